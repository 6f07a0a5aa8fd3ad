"""What the ranks of a whole run exchange, counted: Megatron's all-reduces in a layer, one mean of gradients an update.

Counted are the exchanges that torch's profiler sees on the backend, whoever asked for them: operators of a rank's graph
or DDP's reducer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from torch.profiler import ProfilerActivity, profile

from onward.data.in_memory import InMemoryDataLoader
from onward.environment import Environment
from onward.models import create_model
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.laws.cases import IGNORING, TOKENS, TRANSFORMER, WORDS, Case, gpt2, tokens
from tests.laws.layouts import Layout, merged_sections, rows_of_replica
from tests.laws.rank_pool import call_on_ranks, end_ranks

BATCH, ACCUMULATION, WIDTH = 8, 2, 32
Calls = Counter[tuple[str, int]]
"""(exchange, elements of its operands) -> calls."""


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def count_here(sections: Mapping[str, Any], data: Any, replicas: int) -> tuple[Calls, int]:
    """Exchanges of a run on this rank, and how many elements of weights it holds."""
    runner = TrainingRunner(Parameters.from_mapping(sections), Environment(execution_provider="CPU", threads=1))
    runner.initialize(InMemoryDataLoader(data).feature_specs())
    mine = rows_of_replica(data, runner.mesh.place.data, replicas, BATCH)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
        runner.run(InMemoryDataLoader(mine))
    calls: Calls = Counter()
    for event in profiler.events():
        if event.name.startswith("gloo:"):
            calls[event.name.removeprefix("gloo:"), sum(map(math.prod, event.input_shapes))] += 1
    return calls, sum(weight.parameter.numel() for weight in runner.state.weights.values())


def exchanges(folder: Path, layout: Layout, updates: int, layers: int = 2) -> tuple[Calls, int]:
    """On rank 0."""
    case = Case(gpt2, IGNORING, tokens)
    folder.mkdir(exist_ok=True)
    ir.save(create_model("gpt2", **{**TRANSFORMER, "layers": layers}, dropout=0.0), folder / "model.onnx")
    sections = merged_sections(case, layout, folder, BATCH, updates, ACCUMULATION, {})
    data = tokens(BATCH * ACCUMULATION * updates)
    result: tuple[Calls, int] = call_on_ranks(layout.world_size, count_here, sections, data, layout.data)[0]
    return result


def of_one_update(folder: Path, layout: Layout, layers: int = 2) -> tuple[Calls, int]:
    """What four updates exchange more than three: nothing of the start and the end."""
    fewer, _ = exchanges(folder, layout, 3, layers)
    more, elements = exchanges(folder, layout, 4, layers)
    more.subtract(fewer)
    return Counter({key: count for key, count in more.items() if count}), elements


def test_replicas_of_a_horizontal_pair_exchange_what_megatron_does_and_one_mean_an_update(tmp_path: Path) -> None:
    """Shoeybi et al., 2019, section 3: two sums of b·s·h elements a layer forward, two backward, for every micro-batch.

    Beside them: the embedding's sum and that before the output layer; of each row of logits, whose classes are cut, the
    largest, and two sums; single numbers: the labels of each micro-batch, the norm, the loss, whether to stop.
    """
    layers = 2
    calls, elements = of_one_update(tmp_path, Layout(2, 2, 1), layers)
    rows = BATCH // 2 * TOKENS
    assert calls == {
        ("all_reduce", rows * WIDTH): ACCUMULATION * (4 * layers + 2),
        ("all_reduce", rows): ACCUMULATION,
        ("all_reduce", 2 * rows): ACCUMULATION,
        ("all_reduce", elements): 1,
        ("all_reduce", 1): ACCUMULATION + 3,
    }
    assert elements < WORDS * WIDTH + layers * 12 * WIDTH**2, "a rank holds a part of the weights"


def test_replicas_exchange_one_mean_an_update_whatever_the_accumulation(tmp_path: Path) -> None:
    calls, elements = of_one_update(tmp_path, Layout(2, 1, 1))
    assert calls == {("all_reduce", elements): 1, ("all_reduce", 1): ACCUMULATION + 3}
    assert elements > WORDS * WIDTH + 2 * 12 * WIDTH**2


def test_a_layer_more_costs_a_horizontal_pair_four_sums_a_micro_batch(tmp_path: Path) -> None:
    fewer, _ = of_one_update(tmp_path / "fewer", Layout(1, 2, 1), 1)
    more, _ = of_one_update(tmp_path / "more", Layout(1, 2, 1), 2)
    activation = ("all_reduce", BATCH * TOKENS * WIDTH)
    assert more[activation] - fewer[activation] == 4 * ACCUMULATION
    assert sum(more.values()) - sum(fewer.values()) == 4 * ACCUMULATION

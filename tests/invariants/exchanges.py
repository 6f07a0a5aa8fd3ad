"""The exchanges of entire runs, heard by torch's profiler on the Gloo backend, whoever asked for them."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch.profiler import ProfilerActivity, profile

from onward.data.in_memory import InMemoryDataLoader
from onward.engine import steering
from onward.environment import Environment
from onward.models import create_model
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.invariants.cases import IGNORING, TRANSFORMER, Case, gpt2, tokens
from tests.invariants.layouts import Layout, merged_sections, rows_of_replica
from tests.invariants.rank_pool import call_on_ranks

BATCH, ACCUMULATION = 8, 2
MESSAGE = 1 + len(steering.MESSAGE)
"""Numbers of the message by which ranks agree after an update: whether to stop, and what callbacks ask for."""
Calls = Counter[tuple[str, int, int]]
"""(exchange, elements of its operands, bytes of an element) -> calls."""
_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "unsigned char": 1}


@contextlib.contextmanager
def counted() -> Iterator[Calls]:
    """Fills the counter with the exchanges of this rank when it is left."""
    calls: Calls = Counter()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield calls
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name().startswith("gloo:"):
            (width,) = {_BYTES[dtype] for dtype in event.dtypes()}
            calls[event.name().removeprefix("gloo:"), sum(map(math.prod, event.shapes())), width] += 1


def count_here(sections: Mapping[str, Any], data: Any, replicas: int) -> tuple[Calls, int]:
    """Exchanges of a run on this rank, and how many elements of weights it holds."""
    runner = TrainingRunner(Parameters.from_mapping(sections), Environment(execution_provider="CPU", threads=1))
    runner.initialize(InMemoryDataLoader(data).feature_specs())
    mine = rows_of_replica(data, runner.mesh.place.data, replicas, BATCH)
    with counted() as calls:
        runner.run(InMemoryDataLoader(mine))
    return calls, sum(weight.parameter.numel() for weight in runner.state.weights.values())


def data_of(updates: int) -> dict[str, Any]:
    """Of all replicas."""
    return tokens(BATCH * ACCUMULATION * updates)


def sections_of(folder: Path, layout: Layout, updates: int, layers: int = 2) -> dict[str, dict[str, Any]]:
    """RUN.yaml of a GPT-2; the model is written into the folder."""
    folder.mkdir(exist_ok=True)
    ir.save(create_model("gpt2", **{**TRANSFORMER, "layers": layers}, dropout=0.0), folder / "model.onnx")
    return merged_sections(Case(gpt2, IGNORING, tokens), layout, folder, BATCH, updates, ACCUMULATION, {})


def of_one_update(folder: Path, layout: Layout, layers: int = 2) -> list[tuple[Calls, int]]:
    """What four updates exchange more than three, nothing of the start and the end, on every rank."""
    runs = [
        call_on_ranks(
            layout.world_size, count_here, sections_of(folder, layout, updates, layers), data_of(updates), layout.data
        )
        for updates in (3, 4)
    ]
    found = []
    for (fewer, _), (more, elements) in zip(*runs, strict=True):
        more.subtract(fewer)
        found.append((Counter({key: count for key, count in more.items() if count}), elements))
    return found

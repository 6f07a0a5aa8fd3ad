"""Cuts found without help: the best there are, between layers, within memory."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from onward.errors import ParametersError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.plan.costs.costs import OPERATIONS_PER_BYTE, measure_costs
from onward.plan.pipeline import balance
from onward.plan.pipeline.balance import (
    BYTES_MOVED_PER_BYTE_SENT,
    MEMORY_COPIES,
    TOLERATED_IMBALANCE,
    balanced_stages,
)
from onward.plan.pipeline.stages import plan_stages
from onward.plan.roles import find_roles, node_id
from tests.plan.staged_models import Sketch, graph_of


def uneven(widths: tuple[int, ...]) -> TrainingGraph:
    """A chain of linear layers of these widths, one after the other."""
    sketch = Sketch()
    value = sketch.input("x", ["batch", widths[0]])
    for index, (before, after) in enumerate(pairwise(widths)):
        value = sketch.node("Gemm", f"fc{index}", value, sketch.weight(f"w{index}", before, after))
    model = sketch.model(value)
    return make_training_graph(model, loss=LossSpec(type="mean_squared_error", prediction=str(value.name), label="y"))


WIDTHS = (4, 64, 8, 128, 16, 16, 96, 32, 4)


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_no_other_way_to_cut_has_a_faster_slowest_stage(count: int) -> None:
    """All ways to cut the chain, by exhaustion: cost of the stage's layers, and of what it receives and sends.

    Of those that are nearly as fast as the fastest, none sends a tenth less than the chosen one.
    """
    graph = uneven(WIDTHS)
    costs = measure_costs(graph, {"batch": 16})
    roles = find_roles(graph)
    bound = [node for node in roles.nodes if node in roles.bound]
    time = [costs.nodes[node_id(node)].time for node in bound]
    spent = [t.forward + t.backward_input + t.backward_weight for t in time]
    layers = len(WIDTHS) - 1
    price = 2 * OPERATIONS_PER_BYTE * BYTES_MOVED_PER_BYTE_SENT

    def slowest(cuts: tuple[int, ...]) -> float:
        ends = (0, *cuts, len(bound))
        sent = [0.0, *(costs.value_bytes[f"fc{cut - 1}"] * price for cut in cuts), 0.0]
        return max(sum(spent[begin:end]) + sent[i] + sent[i + 1] for i, (begin, end) in enumerate(pairwise(ends)))

    def sent(cuts: tuple[int, ...]) -> float:
        return sum(costs.value_bytes[f"fc{cut - 1}"] for cut in cuts)

    ways = list(combinations(range(1, layers), count - 1))
    limit = min(map(slowest, ways)) * (1 + TOLERATED_IMBALANCE)
    chosen = balanced_stages(graph, count, roles, costs)
    stages = [chosen[node] for node in bound]
    assert stages == sorted(stages)
    cuts = tuple(stages.index(stage) for stage in range(1, count))
    assert slowest(cuts) <= limit * (1 + 1e-9)
    assert sent(cuts) <= 1.1 * min(sent(way) for way in ways if slowest(way) <= limit)


def test_equal_blocks_are_cut_between_blocks_where_a_cut_inside_would_be_little_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that are four times as wide inside; the last layer moves the middle into one of them."""
    monkeypatch.setattr(balance, "BYTES_MOVED_PER_BYTE_SENT", 0.01)
    graph = uneven((64, *(256, 64) * 60, 640))
    plan = plan_stages(graph, balanced_stages(graph, 2), 2)
    assert [len(stage.weights) for stage in plan.stages] == [62, 59]


def test_buffers_of_what_is_received_count_towards_the_memory_limit() -> None:
    graph = uneven((256,) * 5)
    costs = measure_costs(graph, {"batch": 1})
    limit = 2.5 * 256 * 256 * 4 * MEMORY_COPIES
    assert balanced_stages(graph, 2, costs=costs, memory_limit_bytes=limit, micro_batches=8)
    with pytest.raises(ParametersError, match="no way to cut the network into 2 stages"):
        balanced_stages(graph, 2, costs=costs, memory_limit_bytes=limit, micro_batches=1024)


def test_transformers_are_cut_between_layers() -> None:
    for name in ("gpt2", "bert"):
        graph = graph_of(name)
        plan = plan_stages(graph, balanced_stages(graph, 4), 4)
        assert all(len(stage.received) == 1 for stage in plan.stages[1:])
        layers = [{weight.split(".")[1] if name == "gpt2" else weight.split(".")[3] for weight in stage.weights
                   if weight.startswith(("h.", "bert.encoder.layer"))} for stage in plan.stages]  # fmt: skip
        assert layers == [{"0"}, {"1"}, {"2"}, {"3"}]


def test_more_stages_than_weights_are_refused_with_the_largest_number() -> None:
    graph = graph_of("mlp")
    with pytest.raises(
        ParametersError, match=r"can be cut into 4 stages at most, each with a weight to train; .* 5. Use 4"
    ):
        balanced_stages(graph, 5)
    plan = plan_stages(graph, balanced_stages(graph, 4), 4)
    assert [len(stage.weights) for stage in plan.stages] == [2, 2, 2, 2]


def test_a_memory_limit_moves_the_cut() -> None:
    """The first stage holds three micro-batches, the second one; a limit makes the first smaller."""
    graph = uneven((256, 256, 256, 256, 256, 4))
    costs = measure_costs(graph, {"batch": 1})
    matrix = 256 * 256 * 4
    free = plan_stages(graph, balanced_stages(graph, 2, costs=costs), 2)
    held = [sum(costs.weight_bytes[name] for name in stage.weights) for stage in free.stages]
    assert held[0] == 2 * matrix
    limit = 3.5 * matrix * MEMORY_COPIES
    kept = 256 * 4
    bounded = plan_stages(
        graph,
        balanced_stages(graph, 2, costs=costs, memory_limit_bytes=limit,
                        micro_batches_held=lambda stage: 1 if stage else int(matrix * MEMORY_COPIES / kept)),
        2,
    )  # fmt: skip
    assert [len(stage.weights) for stage in bounded.stages] != [len(stage.weights) for stage in free.stages]
    with pytest.raises(ParametersError, match=r"no way to cut the network into 2 stages keeps each below 0.00 GB"):
        balanced_stages(graph, 2, costs=costs, memory_limit_bytes=matrix)


def test_stages_of_a_deep_network_are_even() -> None:
    graph = uneven((256,) * 65)
    costs = measure_costs(graph, {"batch": 64})
    for count in (8, 16, 64):
        plan = plan_stages(graph, balanced_stages(graph, count, costs=costs), count)
        assert {len(stage.weights) for stage in plan.stages} == {64 // count}

"""From the section `distributed` to stages."""

from __future__ import annotations

from typing import Any

import pytest

from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.parameters.distributed import Distributed
from onward.plan.costs.costs import measure_costs
from onward.plan.pipeline.balance import MEMORY_COPIES
from onward.plan.pipeline.choice import choose_stages
from onward.plan.pipeline.schedules import simulate
from onward.plan.pipeline.stages import StagePlan, plan_stages
from onward.plan.roles import find_roles
from tests.plan.staged_models import AWKWARD_STAGES, graph_of


def stages(graph: TrainingGraph, distributed: Distributed, micro_batches: int, sizes: dict[str, int]) -> StagePlan:
    roles = find_roles(graph)
    stage_of, _ = choose_stages(graph, distributed, roles, micro_batches, lambda: measure_costs(graph, sizes))
    return plan_stages(graph, stage_of, max(stage_of.values()) + 1, roles)


@pytest.mark.parametrize(
    ("name", "fields", "received"),
    [
        ("mlp", {"pipeline_parallel_size": 2, "pipeline_partition_cut_list": "relu0"}, [["relu0"]]),
        ("mlp", {"pipeline_parallel_size": 3, "pipeline_partition_cut_list": ("fc0", "relu1")}, [["fc0"], ["relu1"]]),
        ("mlp", {"pipeline_parallel_size": 2}, [["relu1"]]),
        ("mlp", {"pipeline_parallel_size": 2, "pipeline_schedule": "ZBVZeroBubble"}, [["relu0"], ["relu1"], ["relu2"]]),
        (
            "awkward",
            {"pipeline_parallel_size": 4, "op_id_to_stage": AWKWARD_STAGES},
            [
                ["turned", "flag", "best", "size"],
                ["flag", "size", "sum1", "side_fc"],
                ["size", "side_fc", "fc2"],
            ],
        ),
    ],
)
def test_every_way_of_asking(name: str, fields: dict[str, Any], received: list[list[str]]) -> None:
    plan = stages(graph_of(name), Distributed(**fields), 8, {"batch": 2})
    assert [[transfer.name for transfer in stage.received] for stage in plan.stages[1:]] == received


def test_what_the_schedule_cannot_run_is_refused_before_anything_is_cut() -> None:
    with pytest.raises(ParametersError, match="needs at least 4 micro-batches for an update; there are 2"):
        stages(graph_of("mlp"), Distributed(pipeline_parallel_size=4), 2, {})


def test_costs_of_stages_go_into_the_simulation() -> None:
    """Layers of a transformer cost the same, so that four stages of them wait little more than equal ones."""
    graph = graph_of("gpt2")
    sizes = {"batch": 2, "sequence": 12}
    plan = stages(graph, Distributed(pipeline_parallel_size=4), 16, sizes)
    of_nodes = measure_costs(graph, sizes)
    costs = [of_nodes.total(stage.nodes).time for stage in plan.stages]
    timeline = simulate("1F1B", 4, 16, costs)
    assert 3 / 19 <= timeline.bubble_share < 0.35
    assert all(cost.forward > 0 and cost.backward_weight > 0 for cost in costs)


def test_stages_keep_below_the_memory_that_a_stage_may_take() -> None:
    """1F1B holds two micro-batches on the first of two stages: what it keeps counts twice there."""
    graph = graph_of("gpt2")
    sizes = {"batch": 64, "sequence": 12}
    costs = measure_costs(graph, sizes)

    def bytes_of(plan: StagePlan) -> list[float]:
        return [
            sum(costs.weight_bytes[name] for name in stage.weights) * MEMORY_COPIES
            + sum(costs.nodes[node].kept_bytes for node in stage.nodes if node in costs.nodes) * held
            for stage, held in zip(plan.stages, (2, 1), strict=True)
        ]

    free = bytes_of(stages(graph, Distributed(pipeline_parallel_size=2), 8, sizes))
    limit = max(free) * 0.97
    bounded = bytes_of(stages(graph, Distributed(pipeline_parallel_size=2, stage_memory_gb=limit / 1e9), 8, sizes))
    assert max(bounded) <= limit < max(free)
    with pytest.raises(ParametersError, match=r"keeps each below 0\.00 GB; use more stages"):
        stages(graph, Distributed(pipeline_parallel_size=2, stage_memory_gb=1e-6), 8, sizes)

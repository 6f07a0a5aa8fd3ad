"""What makes pipelines hard: awkward values at the cuts, 16 bits, changing shapes, dropout, errors on one stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from onward.errors import DataError, ModelError, NodeError
from onward.graph.training_graph import TrainingGraph
from onward.parallel.pipeline.stage import StageModule
from onward.parameters.distributed import Distributed
from onward.plan.costs.costs import measure_costs
from onward.plan.pipeline.choice import choose_stages
from onward.plan.pipeline.stages import StagePlan, plan_stages
from onward.plan.roles import find_roles
from tests.parallel.pipeline.test_pipeline import compare
from tests.parallel.pipelines import (
    STAGES_PER_RANK,
    Outcome,
    PlanOf,
    automatic_plan,
    awkward_plan,
    batches,
    by_every_schedule,
    difference,
    in_a_pipeline,
    in_one_process,
    make_pipeline,
    mesh_of,
)
from tests.plan.staged_models import graph_of
from tests.ranks import run_on_ranks

QUARTERS = torch.full((4,), 0.25)


def awkward_on_rank(features: list[dict[str, torch.Tensor]]) -> list[Outcome]:
    return by_every_schedule("awkward", features, QUARTERS, ("logits", "best", "flag"), plan_of=awkward_plan)


def test_integers_shapes_views_and_branches_cross_the_cuts() -> None:
    features = batches("awkward", 4)
    alone = in_one_process("awkward", features, QUARTERS, ("logits", "best", "flag"))
    ranks = run_on_ranks(2, awkward_on_rank, features)
    for index in range(len(STAGES_PER_RANK)):
        compare("awkward", [outcomes[index] for outcomes in ranks], alone)


def cut_plan(graph: TrainingGraph, stage_count: int) -> StagePlan:
    """The U-Net by a cut list in the original's format."""
    distributed = Distributed(
        pipeline_parallel_size=stage_count, pipeline_partition_cut_list="down0-joined0:down1-joined1:down2"
    )
    return plan_stages(
        graph, choose_stages(graph, distributed, find_roles(graph), 4, lambda: measure_costs(graph, {}))[0], stage_count
    )


def joined_plan(graph: TrainingGraph, stage_count: int) -> StagePlan:
    """As the models were cut beforehand; where they are is only asked by who joins them."""
    distributed = Distributed(pipeline_parallel_size=stage_count, pipeline_stage_paths=(Path("0"), Path("1")))
    return plan_stages(
        graph, choose_stages(graph, distributed, find_roles(graph), 4, lambda: measure_costs(graph, {}))[0], stage_count
    )


@pytest.mark.parametrize(("name", "plan_of"), [("u_net", cut_plan), ("joined", joined_plan)])
def test_cut_lists_and_models_cut_beforehand_run(name: str, plan_of: PlanOf) -> None:
    features = batches(name, 4)
    alone = in_one_process(name, features, QUARTERS)
    received = {transfer.name for transfer in plan_of(graph_of(name), 2).stages[1].received}
    assert received == ({"hidden"} if name == "joined" else {"down0", "down1", "down2"})
    compare(name, run_on_ranks(2, in_a_pipeline, name, plan_of, "1F1B", 2, features, QUARTERS), alone)


def bf16_on_rank(features: list[dict[str, torch.Tensor]]) -> list[Outcome]:
    return by_every_schedule("gpt2", features, QUARTERS, (), dtype=torch.bfloat16)


@pytest.mark.slow
def test_under_autocast_values_travel_in_the_types_they_were_computed_in() -> None:
    """Nothing is rounded again on the way: losses are equal to the bit, gradients but for the order of sums."""
    features = batches("gpt2", 4)
    alone = in_one_process("gpt2", features, QUARTERS, dtype=torch.bfloat16)
    for outcomes in run_on_ranks(2, bf16_on_rank, features):
        for outcome in outcomes:
            assert torch.equal(outcome.losses, alone.losses)
            for name, gradient in outcome.gradients.items():
                assert difference(gradient, alone.gradients[name]) < 1e-2, name


def updates_on_rank(rounds: list[list[dict[str, torch.Tensor]]]) -> list[torch.Tensor]:
    pipeline = make_pipeline("gpt2", automatic_plan, "1F1B", 2, 4, mesh_of(2))
    losses = [pipeline.run(features, QUARTERS) for features in rounds]
    with pytest.raises(DataError, match=r"an update takes 4 micro-batches; 3 were given"):
        pipeline.run(rounds[0][:3], QUARTERS)
    with pytest.raises(DataError, match=r"the same shapes in a pipeline: feature 'input_ids' is \[2, 9\] in the first"):
        pipeline.run([*rounds[0][:3], rounds[1][0]], QUARTERS)
    with pytest.raises(ModelError, match="no stage of the pipeline computes a value named 'nothing'"):
        pipeline.evaluate(rounds[0][0], ("nothing",))
    return losses


@pytest.mark.slow
def test_shapes_may_change_from_update_to_update() -> None:
    long, short = batches("gpt2", 4), [{k: v[:1, :5] for k, v in one.items()} for one in batches("gpt2", 4, 7)]
    rounds = [long, short, long]
    expected = [in_one_process("gpt2", features, QUARTERS).losses for features in rounds]
    for found in run_on_ranks(2, updates_on_rank, rounds):
        for one, other in zip(found, expected, strict=True):
            assert difference(one, other) < 1e-5


def dropout_on_rank() -> tuple[list[torch.Tensor], torch.Tensor]:
    pipeline = make_pipeline("gpt2_dropout", automatic_plan, "InterleavedZeroBubble", 4, 4, mesh_of(2))
    losses = []
    for _ in range(2):
        torch.manual_seed(dist.get_rank())
        losses.append(pipeline.run(batches("gpt2", 4), QUARTERS))
        drawn = torch.rand(1)  # where the generator stands: finding shapes, the first time, must draw nothing
    return losses, drawn


@pytest.mark.slow
def test_dropout_draws_once_for_each_micro_batch() -> None:
    without = in_one_process("gpt2", batches("gpt2", 4), QUARTERS).losses
    for losses, _ in run_on_ranks(2, dropout_on_rank):
        assert torch.equal(losses[0], losses[1])
        assert difference(losses[0], without) > 1e-4


class Failing(StageModule):
    """Fails in the third micro-batch."""

    def forward(self, *received: torch.Tensor, microbatch: int) -> object:
        if microbatch == 2:
            raise NodeError("node 'h.3/Add' (Add) failed: shapes do not fit")
        return super().forward(*received, microbatch=microbatch)


def failing_on_rank(schedule: str) -> str:
    pipeline = make_pipeline("mlp", automatic_plan, schedule, 2 * STAGES_PER_RANK[schedule], 4, mesh_of(2))  # type: ignore[index, arg-type]
    if dist.get_rank() == 1:
        pipeline.modules[1].__class__ = Failing
    try:
        pipeline.run(batches("mlp", 4), QUARTERS)
    except Exception as error:
        dist.destroy_process_group()  # what the watch over processes does: the others' waits end
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("schedule", [name for name in ("1F1B", "InterleavedZeroBubble") if name in STAGES_PER_RANK])
def test_an_error_on_one_stage_is_raised_as_it_is_and_leaves_nobody_waiting(schedule: str) -> None:
    first, second = run_on_ranks(2, failing_on_rank, schedule)
    assert second == "NodeError: node 'h.3/Add' (Add) failed: shapes do not fit"
    assert "NodeError" not in first

"""`RankPlan`: a plan as one rank carries it out: its graph, its pipeline stages, and the segments of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onward.graph.quantized_base.passes import store_frozen_weights
from onward.graph.training_graph import TrainingGraph
from onward.plan.costs.segments import SegmentPlan, plan_segments
from onward.plan.decision import Plan, graph_of_rank, stages_of_local_graph
from onward.plan.pipeline.stage_graph import stage_graph
from onward.plan.pipeline.stages import Stage, StagePlan
from onward.plan.topology import Place


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """What is computed on a rank at once: the entire network, or a stage of a pipeline.

    Attributes:
        graph: of the stage, with the rank's shards of its weights.
        stage: what it receives and sends; None: the graph is the entire network.
        segments: where the graph is cut, and what is recomputed.
    """

    graph: TrainingGraph
    stage: Stage | None
    segments: SegmentPlan


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What one rank does.

    Attributes:
        local: the rank's graph, all stages in one.
        stages: of its pipeline; None where there is one stage.
        own: the planned stages by index, ascending.
    """

    local: TrainingGraph
    stages: StagePlan | None
    own: dict[int, PlannedStage]


def plan_rank(
    graph: TrainingGraph,
    plan: Plan,
    place: Place,
    *,
    watched: Sequence[str] = (),
    blocks_compiled: int = 0,
    loss_is_joined: bool = False,
    indices: Sequence[int] | None = None,
) -> RankPlan:
    """Plans one rank.

    Args:
        graph: the entire one.
        plan: of the run.
        place: of the rank.
        watched: values that their stages are to give out, with the outputs of the graph.
        blocks_compiled: how many neighbors of blocks that repeat become a segment, which is compiled; 0: none is.
        loss_is_joined: whether the loss of the last layer is compiled with its neighbors.
        indices: of the stages to plan; None: those of the rank.

    Raises:
        ParametersError: to compute a watched value, something would have to be sent that otherwise does not.
    """
    local = graph_of_rank(graph, plan, place, watched)
    if plan.stage_count == 1:
        return RankPlan(local=local, stages=None, own={0: _planned(plan, local, None, blocks_compiled, loss_is_joined)})
    stages = stages_of_local_graph(local, plan, watched)
    own = {
        index: _planned(plan, stage_graph(local, stages, index), stages.stages[index], blocks_compiled, loss_is_joined)
        for index in (plan.stages_of(place) if indices is None else indices)
    }
    return RankPlan(local=local, stages=stages, own=own)


def _planned(
    plan: Plan, graph: TrainingGraph, stage: Stage | None, blocks_compiled: int, loss_is_joined: bool
) -> PlannedStage:
    graph = store_frozen_weights(graph, plan.frozen)
    segments = plan_segments(
        graph.model.graph,
        graph.weights,
        blocks_compiled > 0 or plan.zero_stage > 0,
        plan.recompute,
        holds_loss=graph.loss_names is not None,
        is_stage=stage is not None,
        blocks_joined=blocks_compiled,
        joins_others=plan.zero_stage == 0,
        joins_loss=loss_is_joined,
        costs=plan.costs,
    )
    return PlannedStage(graph=graph, stage=stage, segments=segments)

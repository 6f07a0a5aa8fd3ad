"""`Plan`: who does what, decided once from the entire graph, the same on every rank, for any number of ranks.

It is made on one process without any other: on a laptop by `onward plan`, and by every rank of a run at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onward.errors import ParametersError
from onward.graph.quantized_base.choice import StoredBase, choose_base
from onward.graph.training_graph import TrainingGraph
from onward.parameters import Parameters
from onward.parameters.distributed import PipelineSchedule, Recompute, stages_of_a_rank
from onward.plan.annotations import compare_splits, read_requested_sharding
from onward.plan.context.cutting import ContextPlan
from onward.plan.costs.costs import GraphCosts, NodeCost
from onward.plan.costs.recompute import check_recompute
from onward.plan.experts import ExpertPlan, localize_experts, plan_experts
from onward.plan.frozen_weights import check_base
from onward.plan.horizontal.local_graph import localize
from onward.plan.horizontal.planning import HorizontalPlan, plan_horizontal
from onward.plan.pipeline.choice import choose_stages
from onward.plan.pipeline.schedules import SPLITS_BACKWARD, stages_of_rank
from onward.plan.pipeline.stages import StagePlan, plan_stages
from onward.plan.roles import ValueRoles, find_roles, node_id
from onward.plan.topology import Place, Topology
from onward.tables import html_fields


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Who does what.

    Attributes:
        topology: the mesh.
        horizontal: which weights the tensor-parallel ranks share.
        context: what the context-parallel ranks share of every sequence.
        stage_of: stage of every node that is computed on one stage only, by the name of its first output.
        stage_count: pipeline stages of all ranks together.
        schedule: in which order the stages compute.
        micro_batches: of one update.
        zero_stage: what replicas shard.
        experts: which replicas hold which experts.
        recompute: what is computed twice to keep less.
        frozen: how frozen weights are stored.
        costs: of nodes, by the name of their first output, where recompute has a budget.
        notes: for the user, one sentence each.
    """

    topology: Topology
    horizontal: HorizontalPlan
    context: ContextPlan = field(default_factory=ContextPlan)
    stage_of: Mapping[str, int] = field(repr=False)
    stage_count: int
    schedule: PipelineSchedule
    micro_batches: int
    zero_stage: int
    recompute: Recompute
    experts: ExpertPlan = field(default_factory=ExpertPlan)
    frozen: StoredBase = field(default_factory=StoredBase)
    costs: Mapping[str, NodeCost] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def zero_words(self) -> str:
        """`ZeRO 3`, `ZeRO 3 in groups of 8`."""
        is_grouped = self.topology.zero_size < self.topology.worker_size
        return f"ZeRO {self.zero_stage}" + (f" in groups of {self.topology.zero_size}" if is_grouped else "")

    def _repr_html_(self) -> str:
        """The main facts, for notebooks; `onward plan` writes all of it."""
        sizes, cut = self.topology, len(self.horizontal.shardings)
        rows = [
            ("ranks", str(sizes.world_size)),
            (
                "data parallel",
                f"{sizes.reader_count} replicas" + (f", {self.zero_words}" if self.zero_stage else ""),
            ),
            ("tensor parallel", f"{sizes.horizontal_size} ranks, {cut} weights sharded"),
            *([("context parallel", f"{sizes.context_size} ranks")] if sizes.context_size > 1 else []),
            *([("expert parallel", f"{self.experts.size} ranks")] if self.experts.size > 1 else []),
            ("pipeline parallel", f"{sizes.pipeline_size} ranks, {self.stage_count} stages, {self.schedule}"),
            ("micro-batches an update", str(self.micro_batches)),
            *(("note", text) for text in self.notes),
        ]
        return html_fields("plan", rows)

    def stages_of(self, place: Place) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        if self.stage_count == 1:
            return (0,)
        return stages_of_rank(self.schedule, self.topology.pipeline_size, self.stage_count, place.pipeline)


def make_plan(
    parameters: Parameters,
    topology: Topology,
    graph: TrainingGraph,
    shapes: Mapping[str, tuple[int, ...]],
    numbers: Mapping[str, Any],
    costs: Callable[[], GraphCosts],
    context: ContextPlan | None = None,
) -> Plan:
    """Decides for an entire run.

    Args:
        parameters: of the run.
        topology: the mesh.
        graph: of the entire network, with its loss; of one context rank, where they share it.
        shapes, numbers: what its values are for one micro-batch (`lowering/building/shapes.py`); read for horizontal
            parallelism only.
        costs: of a micro-batch; counted only for automatic pipeline stages and a budget of recompute.
        context: what `graph` was cut by, where it is the graph of one context rank.

    Raises:
        ParametersError: nothing can be cut as asked.
    """
    distributed = parameters.distributed
    horizontal = plan_horizontal(
        graph,
        topology.horizontal_size,
        shapes,
        numbers,
        sequence_parallel=distributed.sequence_parallel,
        allow_whole_layers=distributed.allow_whole_layers,
    )
    count = topology.pipeline_size * stages_of_a_rank(distributed) if topology.pipeline_size > 1 else 1
    stage_of: dict[str, int] = {}
    requested = read_requested_sharding(graph.source, topology)
    context = context or ContextPlan()
    notes = [*context.notes, *horizontal.notes, *([] if requested is None else compare_splits(requested, horizontal))]
    if count > 1:
        roles = find_roles(graph)
        micro_batches = parameters.training.gradient_accumulation_steps
        chosen, note = choose_stages(graph, distributed, roles, micro_batches, costs, requested)
        notes += [] if note is None else [note]
        stages = plan_stages(graph, chosen, count, roles)  # refuses what cannot be carried out
        _check_split_backward(stages, distributed.pipeline_schedule)
        stage_of = {node_id(node): stage for node, stage in chosen.items()}
    frozen = choose_base(graph, parameters.frozen_weights)
    check_base(frozen, horizontal, graph)
    notes += [frozen.describe(graph)] if frozen.axes else []
    recompute = parameters.recompute
    note = check_recompute(graph.model.graph, recompute, graph.weights)
    notes += [] if note is None else [note]
    return Plan(
        topology=topology,
        horizontal=horizontal,
        context=context,
        stage_of=stage_of,
        stage_count=count,
        schedule=distributed.pipeline_schedule,
        micro_batches=parameters.training.gradient_accumulation_steps,
        zero_stage=distributed.zero_stage if topology.worker_size > 1 else 0,
        experts=plan_experts(graph, distributed),
        recompute=recompute,
        frozen=frozen,
        costs=None if recompute.memory_budget is None else costs().nodes,
        notes=tuple(notes),
    )


def _check_split_backward(stages: StagePlan, schedule: PipelineSchedule) -> None:
    """torch's split backward passes find weights by what a gradient flows back to, and lose those of such stages."""
    if schedule not in SPLITS_BACKWARD:
        return
    for stage in stages.stages[1:]:
        if stage.weights and not any(transfer.with_gradient for transfer in stage.received):
            raise ParametersError(
                f"distributed.pipeline_schedule {schedule} computes gradients of weights separately from those of "
                f"activations, and torch loses them on stage {stage.index}: no gradient flows back from it, since the "
                "stages before it have nothing to train. Use Interleaved1F1B, or give stage 0 trainable layers."
            )


def graph_of_rank(graph: TrainingGraph, plan: Plan, place: Place, gathered: Sequence[str] = ()) -> TrainingGraph:
    """The graph that a rank shares with its pipeline: its parts of the weights, all stages still in one.

    `gathered` names values that are to be gathered where the tensor-parallel ranks have parts of them.
    """
    local = localize(plan.context.of(graph), plan.horizontal, place.horizontal, gathered=gathered)
    return localize_experts(local, plan.experts, plan.experts.rank(place.data))


def stages_of_local_graph(local: TrainingGraph, plan: Plan, watched: Sequence[str] = ()) -> StagePlan:
    """The stages of a rank's own graph; what was added to it goes where its readers are.

    Args:
        local: the graph, all stages in one.
        plan: of the run.
        watched: values that their stages are to give out in addition to the graph's outputs.

    Raises:
        ParametersError: to compute a watched value, something would have to be sent that otherwise does not.
    """
    stages = _stages_of_roles(local, plan, find_roles(local))
    if not watched:
        return stages
    watching = _stages_of_roles(local, plan, find_roles(local, watched))
    if [stage.received for stage in watching.stages] != [stage.received for stage in stages.stages]:
        raise ParametersError(
            f"tensorboard names {', '.join(map(repr, watched))}; to compute them, values would have to be sent between "
            "pipeline stages that training does not need there. Name values that the loss depends on, or train "
            "without distributed.pipeline_parallel_size."
        )
    return watching


def _stages_of_roles(local: TrainingGraph, plan: Plan, roles: ValueRoles) -> StagePlan:
    stage_of: dict[ir.Node, int] = {}
    for node in reversed(roles.nodes):
        if node not in roles.bound:
            continue
        stage = plan.stage_of.get(node_id(node))
        if stage is None:
            readers = [stage_of[user] for value in node.outputs for user in value.consumers() if user in stage_of]
            # Without a reader it is watched, and computed where what it reads is.
            sources = [plan.stage_of.get(node_id(one), 0) for one in node.predecessors()]
            stage = min(readers, default=max(sources, default=plan.stage_count - 1))
        stage_of[node] = stage
    return plan_stages(local, stage_of, plan.stage_count, roles)

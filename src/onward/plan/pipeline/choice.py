"""The stages of a network: where parameters or the model's annotations say, else balanced by cost and memory."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onward.graph.training_graph import TrainingGraph
from onward.parameters.distributed import Distributed, stages_of_a_rank
from onward.plan.annotations import RequestedSharding, requested_stages
from onward.plan.costs.costs import GraphCosts
from onward.plan.costs.stage_cost import StageCost
from onward.plan.pipeline.balance import balanced_stages
from onward.plan.pipeline.cut_list import stages_by_cut_list, stages_by_name, stages_by_note
from onward.plan.pipeline.schedules import check_schedule, simulate
from onward.plan.roles import ValueRoles


def choose_stages(
    graph: TrainingGraph,
    distributed: Distributed,
    roles: ValueRoles,
    micro_batches: int,
    costs: Callable[[], GraphCosts],
    requested: RequestedSharding | None = None,
) -> tuple[dict[ir.Node, int], str | None]:
    """Cuts a network into `pipeline_parallel_size` times stages-per-rank stages.

    Args:
        graph: with its loss; of joined stage models where `pipeline_stage_paths` is given.
        distributed: the section of the parameters.
        roles: of the graph's nodes.
        micro_batches: of one update.
        costs: of a micro-batch, by which stages are balanced; counted only where they are.
        requested: what the model's own annotations ask for; the parameters come first.

    Returns:
        The stage of every node that is computed on one stage only, and what to report to the user of the choice.

    Raises:
        ParametersError: what is asked for does not fit the network, or the schedule.
        ModelError: the network cannot be cut so.
    """
    size, schedule = distributed.pipeline_parallel_size, distributed.pipeline_schedule
    count = size * stages_of_a_rank(distributed)
    check_schedule(schedule, size, count, micro_batches)
    if distributed.pipeline_partition_cut_list:
        return stages_by_cut_list(graph, roles, distributed.pipeline_partition_cut_list, count), None
    if distributed.op_id_to_stage:
        return stages_by_name(graph, roles, distributed.op_id_to_stage, count), None
    if distributed.pipeline_stage_paths:
        return stages_by_note(graph, roles, count), None
    note = None
    if requested is not None and requested.stage_count == count:
        note = f"the {count} pipeline stages are those of the model's own annotations ({requested.configuration!r})."
        return requested_stages(requested, roles), note
    if requested is not None and requested.stage_count:
        note = (
            f"the model's annotations ({requested.configuration!r}) name {requested.stage_count} pipeline stages, but "
            f"pipeline_parallel_size and stages_per_rank ask for {count}; stages are balanced by cost instead."
        )
    limit = distributed.stage_memory_gb
    held = simulate(schedule, size, micro_batches, [StageCost()] * count).peak_micro_batches
    balanced = balanced_stages(
        graph,
        count,
        roles,
        costs(),
        memory_limit_bytes=None if limit is None else limit * 1e9,
        micro_batches_held=held.__getitem__,
        micro_batches=micro_batches,
    )
    return balanced, note

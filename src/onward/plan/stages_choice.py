"""The stages of a network as the parameters ask for them: by cut list, by node, cut beforehand, or balanced by cost."""

from __future__ import annotations

from collections.abc import Mapping

from onward.graph.training_graph import TrainingGraph
from onward.parameter_distribution import Distributed, stages_of_a_rank
from onward.plan.costs import GraphCosts, measure_costs
from onward.plan.schedules import StageCost, check_schedule, simulate
from onward.plan.stages import StagePlan, plan_stages
from onward.plan.stages_balance import balanced_stages
from onward.plan.stages_cut_list import stages_by_cut_list, stages_by_name, stages_by_note
from onward.plan.stages_values import find_roles


def choose_stages(
    graph: TrainingGraph,
    distributed: Distributed,
    micro_batches: int,
    sizes: Mapping[str, int],
    memory_limit_bytes: float | None = None,
) -> StagePlan:
    """Cuts a network into `pipeline_parallel_size` times stages-per-rank stages.

    Args:
        graph: with its loss; of joined stage models where `pipeline_stage_paths` is given.
        distributed: the section of the parameters.
        micro_batches: of one update.
        sizes: symbolic dimensions of the network's inputs -> sizes in a micro-batch, as far as known; stages are
            balanced for these.
        memory_limit_bytes: of one stage, where stages are balanced.

    Raises:
        ParametersError: what is asked for does not fit the network, or the schedule.
        ModelError: the network cannot be cut so.
    """
    size, schedule = distributed.pipeline_parallel_size, distributed.pipeline_schedule
    count = size * stages_of_a_rank(distributed)
    check_schedule(schedule, size, count, micro_batches)
    roles = find_roles(graph)
    if distributed.pipeline_partition_cut_list:
        stage_of = stages_by_cut_list(graph, roles, distributed.pipeline_partition_cut_list, count)
    elif distributed.op_id_to_stage:
        stage_of = stages_by_name(graph, roles, distributed.op_id_to_stage, count)
    elif distributed.pipeline_stage_paths:
        stage_of = stages_by_note(graph, roles, count)
    else:
        held = simulate(schedule, size, micro_batches, [StageCost()] * count).peak_micro_batches
        stage_of = balanced_stages(
            graph,
            count,
            roles,
            measure_costs(graph, sizes, roles),
            memory_limit_bytes=memory_limit_bytes,
            micro_batches_held=held.__getitem__,
        )
    return plan_stages(graph, stage_of, count, roles)


def stage_costs(plan: StagePlan, costs: GraphCosts) -> tuple[StageCost, ...]:
    """What a micro-batch costs each stage, in operations, for `schedules.simulate`."""
    return tuple(costs.total(stage.nodes).time for stage in plan.stages)

"""The memory and the traffic of every rank of a plan, forecast on one process without any other and without a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from onward.data.shard import FeatureSpec
from onward.engine.building.graph_costs import known_costs
from onward.engine.building.sizes import input_sizes, known_dimensions
from onward.engine.forecast.footprint import (
    Measured,
    TensorShape,
    input_shapes_of,
    measure_stage,
    optimizer_slots,
    stage_inputs,
)
from onward.engine.network.precision import Precision
from onward.errors import ModelError, NodeError, ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.lowering.building.shapes import find_value_facts
from onward.optim.building import with_exact_names
from onward.parallel.data_parallel import REDUCTION_TYPES
from onward.parameters import Parameters
from onward.plan.communication import estimated_traffic, replica_traffic, stage_traffic, tied_traffic, weight_elements
from onward.plan.costs.costs import GraphCosts
from onward.plan.decision import Plan
from onward.plan.memory import (
    Forecast,
    RankForecast,
    StageFootprint,
    estimated_footprint,
    rank_memory,
    stage_cost,
)
from onward.plan.pipeline.schedules import Timeline, simulate
from onward.plan.pipeline.stages import StagePlan
from onward.plan.rank import PlannedStage, RankPlan, plan_rank
from onward.plan.topology import Place


def forecast(
    parameters: Parameters,
    graph: TrainingGraph,
    plan: Plan,
    specs: Mapping[str, FeatureSpec] | None = None,
    *,
    pipelines: Sequence[int] | None = None,
    counts: bool = True,
) -> Forecast:
    """Measures every stage once, on the first rank that holds it, and puts the stages of each rank together.

    Args:
        parameters: of the run.
        graph: of the entire network, with its loss.
        plan: for any number of ranks.
        specs: what the data's samples have, where it is known.
        pipelines: places in a pipeline whose ranks are forecast; None: all.
        counts: whether costs of nodes are counted that only a report reads.

    Raises:
        ParametersError: the size of a dimension of the inputs is not known.
    """
    pipelines = range(plan.topology.pipeline_size) if pipelines is None else pipelines
    indices = sorted(stage for one in pipelines for stage in plan.stages_of(Place(0, 0, one)))
    parameters = dataclasses.replace(parameters, optimizer=with_exact_names(parameters.optimizer, graph))
    dimensions = known_dimensions(parameters.training, graph, specs or {})
    shapes = input_shapes_of(graph, input_sizes(graph, dimensions))
    costs = functools.cache(lambda: known_costs(graph, dimensions))
    rank = plan_rank(graph, plan, Place(0, 0, 0), indices=indices)
    local, stages = rank.local, rank.stages
    timeline = None if stages is None else _timeline(plan, stages, costs())
    footprints: dict[int, StageFootprint] = {}
    arrived = {} if len(indices) == plan.stage_count else _known_arrivals(parameters, rank, dimensions)
    for index, planned in rank.own.items():
        place = Place(0, 0, 0 if timeline is None else timeline.rank_of_stage[index])
        measured = _measure(planned, parameters, plan, place, stage_inputs(planned.graph, shapes, arrived), costs)
        footprints[index] = measured.footprint
        arrived |= measured.sent
    ranks, steps = [], parameters.training.known_steps
    updates = None if steps is None else steps // parameters.training.gradient_accumulation_steps
    for pipeline in pipelines:
        own = {stage: footprints[stage] for stage in plan.stages_of(Place(0, 0, pipeline))}
        spans = () if timeline is None else timeline.ranks[pipeline]
        width = REDUCTION_TYPES[parameters.distributed.reduction_type].itemsize
        traffic = (
            *stage_traffic(own, plan.micro_batches, stages is not None),
            *replica_traffic(parameters.distributed, plan, local, stages, pipeline, width, updates),
            *tied_traffic(plan, local, stages, pipeline),
        )
        ranks.append(RankForecast(pipeline, rank_memory(own, plan.micro_batches, plan.schedule, spans), traffic))
    return Forecast(
        ranks=tuple(ranks),
        footprints=footprints,
        planned=rank,
        timeline=timeline,
        costs=costs() if counts else GraphCosts(nodes={}, value_bytes={}, weight_bytes={}),
        inputs=_as_text(shapes),
    )


def _known_arrivals(parameters: Parameters, rank: RankPlan, dimensions: Mapping[str, int]) -> dict[str, TensorShape]:
    """What stages receive, inferred from the graph, where those before them are not run."""
    assert rank.stages is not None
    shapes = find_value_facts(rank.local, input_sizes(rank.local, dimensions)).shapes
    names = [one.name for stage in rank.stages.stages for one in stage.received]
    dtype = Precision.of(parameters.mixed_precision).dtype or torch.float32
    return {name: (shapes[name], dtype) for name in names if name in shapes}


def _measure(
    planned: PlannedStage,
    parameters: Parameters,
    plan: Plan,
    place: Place,
    inputs: Mapping[str, TensorShape],
    count: Callable[[], GraphCosts],
) -> Measured:
    """What a stage needs: measured, or, where it cannot run without its data, estimated with the reason."""
    try:
        return measure_stage(planned, parameters, plan.topology, place, inputs, plan.micro_batches)
    except (ModelError, ParametersError) as error:
        if not isinstance(error, NodeError):
            raise
        why = str(error)
    except Exception as error:  # shapes that depend on data, operators without a fake twin: torch has no one class
        lines = str(error).splitlines()
        why = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    part, stage, costs = planned.graph, planned.stage, count()
    data, zero = plan.topology.zero_size, plan.zero_stage
    known = [name for node in part.model.graph for name in [str(node.outputs[0].name)] if name in costs.nodes]
    estimated = estimated_footprint(
        4.0 * sum(weight_elements(part).values()),
        costs.total(known).kept_bytes,
        optimizer_slots(parameters.optimizer, part),
        plan.micro_batches,
        (data if zero else 1, data if zero > 1 else 1, data if zero > 2 else 1),
        int(parameters.averaging.kind is not None),
        parameters.distributed.outer_tensors,
    )
    sent = {} if stage is None else {t.name: _guessed(t.name, costs) for t in stage.sent}
    traffic = estimated_traffic(
        part.model.graph, costs.value_bytes, plan.topology.horizontal_size, plan.topology.context_size
    )
    first, between = (traffic if plan.micro_batches > count else () for count in (1, 2))
    return Measured(
        dataclasses.replace(estimated, problem=why, traffic_first=first, traffic_between=between, traffic_last=traffic),
        sent,
    )


def _guessed(name: str, costs: GraphCosts) -> TensorShape:
    return (int(costs.value_bytes.get(name, 0.0)) // 4,), torch.float32


def _timeline(plan: Plan, stages: StagePlan, costs: GraphCosts) -> Timeline:
    found = [stage_cost(stage, costs).time for stage in stages.stages]
    return simulate(plan.schedule, plan.topology.pipeline_size, plan.micro_batches, found)


def _as_text(shapes: Mapping[str, TensorShape]) -> dict[str, str]:
    return {
        name: f"{' x '.join(map(str, sizes)) or 'scalar'} {str(dtype).removeprefix('torch.')}"
        for name, (sizes, dtype) in shapes.items()
    }

"""A run's network as arrays for the search of a layout: read, shaped and counted once, without its weights' values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch

from onward.data.shard import FeatureSpec
from onward.engine.building.graph_costs import known_costs
from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.building.sequences import plan_sequences
from onward.engine.building.sizes import input_sizes, known_dimensions
from onward.engine.forecast.batch_size import refuse_fixed_batch
from onward.engine.forecast.footprint import input_shapes_of, measure_kept, optimizer_slots, stage_inputs
from onward.engine.network.precision import Precision
from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.lowering.building.shapes import find_value_facts
from onward.optim.building import with_exact_names
from onward.parallel.data_parallel import REDUCTION_TYPES
from onward.parallel.pipeline.pipeline import knows_gradients
from onward.parameters import Parameters
from onward.parameters.distributed import Recompute
from onward.plan.batch_size import samples_of_update
from onward.plan.costs.costs import GraphCosts
from onward.plan.costs.recompute import find_attention
from onward.plan.experts import plan_experts
from onward.plan.horizontal.planning import HorizontalPlan, common_size, plan_horizontal
from onward.plan.rank import plan_rank
from onward.plan.roles import find_roles, node_id
from onward.plan.search.layout import Settings
from onward.plan.search.network import KEPT, NetworkWork, count_work, is_mixture, width_of
from onward.plan.topology import Place, Topology
from onward.schedules.pipeline.registry import PIPELINES


class TrainingGraphs:
    """The training graph of a run in the forms that layouts need, each read once.

    Args:
        parameters: of the run, in any layout.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._known: dict[bool, TrainingGraph] = {}

    def of(self, is_shared: bool) -> TrainingGraph:
        """As one rank computes it, or as tensor-parallel ranks do."""
        if is_shared not in self._known:
            split = dataclasses.replace(self._parameters.distributed, horizontal_parallel_size=2 if is_shared else 1)
            self._known[is_shared] = read_training_graph(dataclasses.replace(self._parameters, distributed=split))
        return self._known[is_shared]


def count_network(
    parameters: Parameters, specs: Mapping[str, FeatureSpec], ranks: int, graphs: TrainingGraphs | None = None
) -> tuple[NetworkWork, ...]:
    """The network as one rank computes it, and, where it can be, as tensor-parallel ranks do.

    Args:
        parameters: of the run.
        specs: what the data's samples have, where it is known.
        ranks: processes of the run.
        graphs: of the run; None: they are read.

    Raises:
        ParametersError: no weight trains, the micro-batch is fixed, or the size of a dimension is not known.
    """
    graphs = graphs or TrainingGraphs(parameters)
    graph = graphs.of(False)
    if not graph.weights:
        raise ParametersError(graph.why_nothing_trains())
    refuse_fixed_batch(parameters, graph, "the search of a layout", "set the sizes in the section distributed")
    # Recompute is priced; that of attention is part of what is counted.
    kept_as_written = Recompute(
        attention=parameters.recompute.attention, cheap_activations=parameters.recompute.cheap_activations
    )
    parameters = dataclasses.replace(parameters, recompute=kept_as_written)
    samples = min(COUNTED_SAMPLES, parameters.training.batch_size)
    counted = dataclasses.replace(parameters, training=dataclasses.replace(parameters.training, batch_size=samples))
    costs = known_costs(graph, known_dimensions(counted.training, graph, specs))
    found = [_count(counted, graph, specs, ranks, 1, costs)]
    if ranks > 1:
        found.append(_count(counted, graphs.of(True), specs, ranks, ranks))
    assert found[0] is not None
    share = _measured_share(counted, graph, specs, found[0])
    kept = KEPT if 1 / COUNTED_WITHIN < share < COUNTED_WITHIN else (1.0, 0.0)
    return tuple(
        dataclasses.replace(one, kept=(one.kept - one.kept_exactly) * share + one.kept_exactly, kept_shares=kept)
        for one in found
        if one is not None
    )


def with_context(
    parameters: Parameters,
    specs: Mapping[str, FeatureSpec],
    ranks: int,
    works: Sequence[NetworkWork],
    graphs: TrainingGraphs | None = None,
) -> tuple[NetworkWork, ...]:
    """The network as context ranks compute it, too: what they share, and the keys and values that each gathers.

    The arguments are those of `count_network`, and `works` what it counted.

    Raises:
        ParametersError: no sequences can be shared.
    """
    graph = (graphs or TrainingGraphs(parameters)).of(False)
    dimensions = known_dimensions(parameters.training, graph, specs)
    plan, facts, batch = plan_sequences(graph, 2, dimensions, parameters.training.batch_size)
    nodes = [node for node in plan.of(graph).model.graph if node.op_type == "ContextAttention"]
    if not nodes:
        raise ParametersError("sequences without attention are shared only where context_parallel_size asks for it")
    read = [str(value.name) for node in nodes for value in node.inputs[1:3] if value is not None]
    elements = sum(math.prod(facts.shapes.get(name, (0,))) for name in read)
    length = math.gcd(*plan.lengths)
    return tuple(
        dataclasses.replace(
            one,
            context_sizes=tuple(n for n in range(2, ranks + 1) if ranks % n == 0 and length % (2 * n) == 0),
            context_share=plan.share,
            gathered=elements * one.width / batch,
            attentions=len(nodes),
        )
        for one in works
    )


def _expert_sizes(parameters: Parameters, graph: TrainingGraph, ranks: int) -> tuple[int, ...]:
    """Numbers of replicas that can share the experts of every mixture."""
    common = math.gcd(*(node.attributes["experts"].as_int() for node in graph.model.graph if is_mixture(node)))
    found = [size for size in range(2, min(common, ranks) + 1) if common % size == 0 and ranks % size == 0]
    try:
        for size in found[:1]:
            plan_experts(graph, dataclasses.replace(parameters.distributed, expert_parallel_size=size))
    except ParametersError:  # other layers read their weights, too
        return ()
    return tuple(found)


def _count(
    parameters: Parameters,
    graph: TrainingGraph,
    specs: Mapping[str, FeatureSpec],
    ranks: int,
    most: int,
    costs: GraphCosts | None = None,
) -> NetworkWork | None:
    """The arrays for tensor parallelism of 2 to `most` ranks, or of one; None: nothing can be shared.

    `costs` are the graph's where they are known.
    """
    dimensions = known_dimensions(parameters.training, graph, specs)
    shapes = input_sizes(graph, dimensions)
    batch = next((shape[0] for shape in shapes.values() if shape), 1)
    horizontal, tokens, known = HorizontalPlan(size=1), 1, dict[str, tuple[int, ...]]()
    sizes: tuple[int, ...] = (1,)
    if most > 1:
        facts = find_value_facts(graph, shapes)
        known = dict(facts.shapes)
        common = common_size(graph, facts.shapes, facts.numbers)
        sizes = tuple(size for size in range(2, min(common, most) + 1) if common % size == 0 and most % size == 0)
        if not sizes:
            return None
        try:
            horizontal = plan_horizontal(graph, sizes[0], facts.shapes, facts.numbers, sequence_parallel=True)
            tokens = math.gcd(*(facts.shapes[name][axis] for name, axis in horizontal.token_axes.items()))
        except ParametersError:  # no tokens can be shared
            horizontal = plan_horizontal(graph, sizes[0], facts.shapes, facts.numbers)
    roles = find_roles(graph)
    costs = known_costs(graph, dimensions, roles, known) if costs is None else costs
    work = count_work(
        graph,
        costs,
        roles,
        horizontal,
        tensor_sizes=sizes,
        token_size=tokens,
        batch=batch,
        expert_sizes=_expert_sizes(parameters, graph, ranks),
    )
    if not parameters.recompute.attention:
        return work
    again = frozenset[ir.Node]().union(*find_attention(graph.model.graph, graph.weights))
    is_again = np.array([node in again for node in roles.nodes if node in roles.bound])
    return dataclasses.replace(work, backward=work.backward + work.forward * is_again)


COUNTED_SAMPLES = 8
"""Enough to be a batch; inferring the shapes of thousands would compute numbers of their size."""
COUNTED_WITHIN = 1.4
"""Where more is kept than is counted, as with dropout in attention, `recompute.memory_budget` cannot share it out."""
MEASURED_NODES = 400
"""Of a longer network only a stretch of about so many is run on fake tensors."""


def _measured_share(
    parameters: Parameters, graph: TrainingGraph, specs: Mapping[str, FeatureSpec], work: NetworkWork
) -> float:
    """What the program keeps for the backward pass, as a share of what `work` counts in its precision.

    A stretch of the network is run on fake tensors, as forecasts are; 1 where that cannot be done.
    """
    stages = max(1, len(graph.model.graph) // MEASURED_NODES)
    split = dataclasses.replace(parameters.distributed, pipeline_parallel_size=stages, pipeline_schedule="GPipe")
    parameters = dataclasses.replace(parameters, distributed=split)
    dimensions = known_dimensions(parameters.training, graph, specs)
    shapes = input_sizes(graph, dimensions)
    try:
        plan = plan_run(parameters, Topology(pipeline_size=stages), graph, specs)
        (planned,) = plan_rank(graph, plan, Place(0, 0, stages // 2), indices=[stages // 2]).own.values()
        dtype = Precision.of(parameters.mixed_precision).dtype or torch.float32
        facts = find_value_facts(graph, shapes).shapes if stages > 1 else {}
        arrived = {one.name: (facts[one.name], dtype) for one in (planned.stage.received if planned.stage else ())}
        inputs = stage_inputs(planned.graph, input_shapes_of(graph, shapes), arrived)
        kept = measure_kept(planned, parameters, plan.topology, Place(0, 0, stages // 2), inputs)
    except Exception:  # shapes that depend on data, operators without a fake twin: torch has no one class for them
        return 1.0
    names = {str(node.outputs[0].name) for node in planned.graph.model.graph}
    roles = find_roles(graph)
    is_run = np.array([node_id(node) in names for node in roles.nodes if node in roles.bound])
    width = 1.0 if dtype is torch.float32 else dtype.itemsize / width_of(graph)
    counted = float(work.kept[is_run].sum()) * parameters.training.batch_size * width
    kept -= float(work.kept_once[is_run].sum())
    return kept / counted if kept > 0 and counted else 1.0


def search_settings(
    parameters: Parameters, graph: TrainingGraph, ranks: int, memory_bytes: float, torch_version: str
) -> Settings:
    """What the price of a layout depends on; the samples of an update are those of the run as it is written.

    Args:
        parameters: of the run.
        graph: of the entire network.
        ranks: processes.
        memory_bytes: of a rank.
        torch_version: of the torch that is to train.
    """
    dtype, recompute = Precision.of(parameters.mixed_precision).dtype, parameters.recompute
    asked = 0.0 if recompute.segments else recompute.memory_budget
    return Settings(
        ranks=ranks,
        samples=samples_of_update(parameters) * parameters.distributed.data_parallel_size,
        memory_bytes=memory_bytes,
        precision="fp32" if dtype is None else {"torch.bfloat16": "bf16"}.get(str(dtype), "fp16"),
        slots=optimizer_slots(with_exact_names(parameters.optimizer, graph), graph),
        gradient_bytes=float(REDUCTION_TYPES[parameters.distributed.reduction_type].itemsize),
        kept=(1.0,) if asked is None and recompute.attention else () if asked is None else (asked,),
        later_samples=tuple(
            samples_of_update(one) * one.distributed.data_parallel_size for one in parameters.next_rounds
        ),
        averages=int(parameters.averaging.kind is not None),
        schedules=tuple(kind.name for kind in PIPELINES if knows_gradients(torch_version) or not kind.splits_backward),
    )

"""Expert parallelism: which replicas hold which experts of every mixture, and the graph that one of them computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from onward.errors import ParametersError
from onward.graph.fusion.rewriting import DOMAIN
from onward.graph.nodes.provenance import shown_node
from onward.graph.reading.tensor_storage import close_file
from onward.graph.training_graph import TrainingGraph
from onward.parameters.distributed import Distributed
from onward.plan.shards import range_of_rank


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """Where experts are. Of `size` replicas in succession each holds as many; other weights are on all of them.

    Attributes:
        size: replicas that share the experts of a layer.
        capacity_factor: tokens that an expert takes of a replica's, relative to an equal share; None: all.
        nodes: mixtures, by the names of their results.
        stacks: weights whose first axis are the experts.
        owners: weight of one expert -> which of the replicas holds it.
    """

    size: int = 1
    capacity_factor: float | None = None
    nodes: tuple[str, ...] = ()
    stacks: frozenset[str] = frozenset()
    owners: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def weights(self) -> frozenset[str]:
        """Weights that the replicas hold different parts of."""
        return self.stacks | self.owners.keys()

    def rank(self, data: int) -> int:
        """Which of the replicas that share experts is at a place of the data dimension."""
        return data % self.size


ALL_EVERYWHERE = ExpertPlan()
"""Every replica has all experts."""


def plan_experts(graph: TrainingGraph, distributed: Distributed) -> ExpertPlan:
    """Where the experts of every mixture are to be.

    Raises:
        ParametersError: the model has no mixture that is recognized, or one that cannot be shared so.
    """
    size, factor = distributed.expert_parallel_size, distributed.expert_capacity_factor
    if size == 1 and factor is None:
        return ALL_EVERYWHERE
    asked = f"expert_parallel_size is {size}" if size > 1 else f"expert_capacity_factor is {factor:g}"
    nodes = [node for node in graph.model.graph if node.domain == DOMAIN and node.op_type == "Experts"]
    if not nodes:
        seen = f" Seen: {graph.unfused[0]}" if graph.unfused else ""
        raise ParametersError(
            f"distributed.{asked}, but no mixture of experts was recognized in the model. Looked for: a TopK or ArgMax "
            "of scores of experts, and after it feed-forward layers whose results are weighed by these scores and "
            "added up; or such layers of slots that the model fills with tokens. `onward inspect` lists them as the "
            "fusion `experts`, which section speed must leave on. "
            "Leave the field out, or export experts in one of the forms that docs/explanation/fusion.md names." + seen
        )
    if factor is not None and not any(map(has_choices, nodes)):
        raise ParametersError(
            f"distributed.expert_capacity_factor is {factor:g}, but the model puts tokens into slots of its experts "
            f"itself ({shown_node(nodes[0])}), and drops those for which there is no slot. Leave the field out."
        )
    stacks, owners = set[str](), dict[str, int]()
    for node in nodes if size > 1 else ():
        experts = node.attributes["experts"].as_int()
        names = [str(value.name) for value in node.inputs[3:] if value is not None]
        shown = graph.known_as.shown(names[0])
        if experts % size:
            raise ParametersError(
                f"distributed.{asked}, which does not divide the {experts} experts of {shown!r}. Set it to a divisor "
                f"of {experts}."
            )
        if any(len(value.uses()) > 1 for value in node.inputs[3:] if value is not None):
            raise ParametersError(
                f"distributed.{asked}, but weights of the experts of {shown!r} are read by other layers, too, and "
                "would have to be on all processes. Set it to 1."
            )
        each = len(names) // layer_count(node)
        if each == 1:
            stacks |= set(names)
        else:
            owners |= {name: index % each * size // experts for index, name in enumerate(names)}
    return ExpertPlan(
        size=size,
        capacity_factor=factor,
        nodes=tuple(str(node.outputs[0].name) for node in nodes),
        stacks=frozenset(stacks),
        owners=owners,
    )


def has_choices(node: ir.Node) -> bool:
    """Whether a mixture takes tokens with the experts they choose, not slots of experts that the model fills."""
    return node.inputs[1] is not None


def layer_count(node: ir.Node) -> int:
    """How many kinds of weights the experts of a mixture have: matrices and biases."""
    layers = 3 if node.attributes["gated"].as_int() == 1 else 2
    return layers * (1 + node.attributes["is_biased"].as_int())


def shared_expert_weights(local: TrainingGraph) -> list[str]:
    """The trained weights of a rank's graph that other replicas hold other parts of."""
    shared = [node for node in local.model.graph if node.op_type == "Experts" and "expert_size" in node.attributes]
    names = {str(value.name) for node in shared for value in node.inputs[3:] if value is not None}
    return [name for name in local.weights if name in names]


def localize_experts(graph: TrainingGraph, plan: ExpertPlan, rank: int) -> TrainingGraph:
    """The graph of one of the replicas that share experts, with its own experts alone.

    Args:
        graph: of the tensor-parallel rank; it is left as it is, and its weights are read when the rank's are.
        plan: the decision.
        rank: of the replica among those that share experts.
    """
    if not plan.nodes:
        return graph
    model = graph.model.clone()
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type == "Experts":
            _localize(model.graph, node, plan, rank)
    gone = {name for name, owner in plan.owners.items() if owner != rank}
    weights = tuple(name for name in graph.weights if name not in gone)
    ties = {name: tie for name, tie in graph.ties.items() if tie.weight not in gone}
    return replace(graph, model=model, weights=weights, ties=ties)


def _localize(graph: ir.Graph, node: ir.Node, plan: ExpertPlan, rank: int) -> None:
    if plan.capacity_factor is not None and has_choices(node):
        node.attributes["capacity_factor"] = ir.AttrFloat32("capacity_factor", plan.capacity_factor)
    if plan.size == 1:
        return
    node.attributes["expert_size"] = ir.AttrInt64("expert_size", plan.size)
    given = list(node.inputs)
    kept = [value for value in given if value is None or plan.owners.get(str(value.name), rank) == rank]
    for index in range(3, len(given)):
        node.replace_input_with(index, None)
    node.resize_inputs(len(kept))
    for index, value in enumerate(kept):
        node.replace_input_with(index, value)
    for value in given[3:]:
        if value is not None and value.name in plan.stacks:
            _take_experts(value, rank, plan.size)
        elif value is not None and plan.owners[str(value.name)] != rank:
            graph.initializers.pop(str(value.name))


def _take_experts(value: ir.Value, rank: int, size: int) -> None:
    stored = value.const_value
    assert stored is not None
    experts, *rest = (int(n) for n in stored.shape.numpy())
    start, end = range_of_rank(experts, rank, size)

    def read() -> ir.TensorProtocol:
        part = np.array(stored.numpy()[start:end])
        close_file(stored)
        return ir.Tensor(part, dtype=stored.dtype)

    shape = ir.Shape((end - start, *rest))
    value.const_value = ir.LazyTensor(read, dtype=stored.dtype, shape=shape, name=value.name)
    value.shape = shape

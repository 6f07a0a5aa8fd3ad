"""What each node of a graph costs: floating point operations, bytes moved, bytes kept for the backward pass.

Counted from shapes alone, per operator of the ONNX standard. One multiply-add is two operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.shape_inference import inferred_values
from onward.graph.operators import Fact, has_fact, operator, operators_with
from onward.graph.reading.dimensions import bind_dimensions, evaluate_dimension, symbolic_dimensions
from onward.graph.shared_inputs import is_worth_recomputing
from onward.graph.training_graph import TrainingGraph
from onward.plan.costs.stage_cost import StageCost
from onward.plan.roles import ValueRoles, find_roles, node_id

OPERATIONS_PER_BYTE = 20.0
"""Operations that a device does in the time in which it moves a byte: between a CPU (about 10) and an H100 in fp32."""

DEFAULT_SIZE = 64
"""Taken for a symbolic dimension whose size is not given."""

_VIEWS = operators_with(Fact.SAME_ELEMENTS | Fact.VIEW | Fact.SHAPE_ONLY)
_UNCOUNTED = frozenset({"QLinearMatMul", "QLinearConv", "LinearAttention", "FlexAttention"})
"""Operators of the standard that multiply matrices and that `_operations` does not count."""
_READS_REMATERIALIZED = frozenset({"Conv", "AveragePool", "HardSwish", "Swish"})
"""These read what follows a batch normalization without keeping it, under the same field."""


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """What one node costs a micro-batch.

    Attributes:
        forward: operations of the forward pass.
        backward_input: operations for the gradients of activations.
        backward_weight: operations for the gradients of weights.
        moved_bytes: read and written by the forward pass.
        kept_bytes: of the tensors that the backward pass needs of this node's making.
        output_bytes: of what it computes.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    moved_bytes: float = 0.0
    kept_bytes: float = 0.0
    output_bytes: float = 0.0

    def __add__(self, other: NodeCost) -> NodeCost:
        return NodeCost(
            forward=self.forward + other.forward,
            backward_input=self.backward_input + other.backward_input,
            backward_weight=self.backward_weight + other.backward_weight,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            kept_bytes=self.kept_bytes + other.kept_bytes,
            output_bytes=self.output_bytes + other.output_bytes,
        )

    @property
    def time(self) -> StageCost:
        """Forward and backward in operations, with the time of moving bytes counted as operations, too."""
        moving = self.moved_bytes * OPERATIONS_PER_BYTE
        trains = bool(self.backward_input or self.backward_weight or self.kept_bytes)
        return StageCost(self.forward + moving, self.backward_input + moving * trains, self.backward_weight)


@dataclass(frozen=True, kw_only=True)
class GraphCosts:
    """Costs of every node of a graph, and the size of every value.

    Attributes:
        nodes: by the name of their first output.
        value_bytes: of every value, as far as its shape is known.
        weight_bytes: of every trained weight and running statistic, as stored.
        shapes: of every value that nodes read; as `value_bytes`, guesses where they are not known.
        uncounted: nodes whose operations are guessed or left out: sizes that depend on values, nested graphs,
            operators outside the standard.
        guessed: those of them with matmuls whose sizes are guessed.
    """

    nodes: Mapping[str, NodeCost]
    value_bytes: Mapping[str, float]
    weight_bytes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    uncounted: frozenset[str] = frozenset()
    guessed: frozenset[str] = frozenset()

    def total(self, nodes: Iterable[str]) -> NodeCost:
        """What some nodes cost together."""
        return sum((self.nodes[name] for name in nodes), NodeCost())


def measure_costs(
    graph: TrainingGraph,
    sizes: Mapping[str, int],
    roles: ValueRoles | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> GraphCosts:
    """Counts what a micro-batch costs, node by node.

    Args:
        graph: the network with its loss.
        sizes: symbolic dimension of the inputs -> size; others count as `DEFAULT_SIZE`.
        roles: of the graph's nodes, where they are known already.
        shapes: of values, where they are known already; else ONNX's inference finds them, which stops at fused nodes.

    Raises:
        ModelError: a name in `sizes` is no dimension of the graph's inputs, or a size contradicts the graph.
    """
    roles = roles or find_roles(graph)
    found = _Shapes(graph, sizes, shapes or {})
    kept = _kept_values(roles)
    nodes = {node_id(node): _cost_of(node, roles, found, kept) for node in roles.nodes}
    value_bytes = {str(value.name): found.bytes(value) for node in roles.nodes for value in node.outputs if value.name}
    initializers = graph.model.graph.initializers
    weight_bytes = {
        name: initializers[name].const_value.nbytes  # type: ignore[union-attr]
        for name in (*graph.weights, *graph.states)
        if name in initializers
    }
    guessed = frozenset(
        node_id(n) for n in roles.nodes if nodes[node_id(n)].forward and not _has_known_shapes(n, found, sizes)
    )
    uncounted = guessed | {node_id(n) for n in roles.nodes if not _is_counted(n)}
    return GraphCosts(
        nodes=nodes,
        value_bytes=value_bytes,
        weight_bytes=weight_bytes,
        shapes={str(value.name): found.of(value) for node in roles.nodes for value in node.inputs if value is not None},
        uncounted=uncounted,
        guessed=guessed,
    )


def _with_guesses(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """A model with sizes for its open dimensions; as it is where it was traced at one size and takes no other."""
    guessed = model.clone()
    try:
        bind_dimensions(guessed, sizes)
    except ModelError:
        return model
    return guessed


def _is_counted(node: ir.Node) -> bool:
    """Whether the operations of a node are known: it has none, or they follow from shapes."""
    if node.domain not in ("", "ai.onnx") or node.op_type in _UNCOUNTED:
        return False
    return not any(one.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for one in node.attributes.values())


def _has_known_shapes(node: ir.Node, shapes: _Shapes, sizes: Mapping[str, int]) -> bool:
    return all(shapes.is_known(value, sizes) for value in (*node.inputs, *node.outputs) if value is not None)


class _Shapes:
    """The size of every value, with guesses where shape inference finds none."""

    def __init__(self, graph: TrainingGraph, sizes: Mapping[str, int], given: Mapping[str, tuple[int, ...]]) -> None:
        self._given = given
        model = graph.model.clone()
        for value in (output for node in model.graph for output in node.outputs):
            if value.type is None:
                value.shape = None  # a shape without a type cannot be written down, and is inferred again
        self._sizes = dict.fromkeys(symbolic_dimensions(model), DEFAULT_SIZE) | dict(sizes)
        if sizes:
            bind_dimensions(model, sizes)
        others = {name: size for name, size in self._sizes.items() if name not in sizes}
        model = model if not others else _with_guesses(model, others)
        self._values = inferred_values(model)
        self._inputs = {str(value.name): value for value in model.graph.inputs}
        self._guessed: dict[ir.Value, tuple[int, ...]] = {}

    def of(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of a value; an unknown size is `DEFAULT_SIZE`, an unknown shape the largest that its node reads."""
        if value.const_value is not None:
            return tuple(int(size) for size in value.const_value.shape.numpy())
        if str(value.name) in self._given:
            return self._given[str(value.name)]
        known = self._values.get(str(value.name)) or self._inputs.get(str(value.name)) or value
        if known.shape is not None:
            return tuple(size if isinstance(size, int) else self._size_of(size) for size in known.shape)
        if value not in self._guessed:
            self._guessed[value] = ()
            node = value.producer()
            read = [] if node is None else [self.of(v) for v in node.inputs if v is not None and v.const_value is None]
            self._guessed[value] = max(read, key=math.prod, default=())
        return self._guessed[value]

    def is_known(self, value: ir.Value, sizes: Mapping[str, int]) -> bool:
        """Whether the shape of a value follows from the sizes of the inputs' dimensions."""
        if value.const_value is not None or not value.name or value.name in self._given:
            return True
        shape = (self._values.get(str(value.name)) or self._inputs.get(str(value.name)) or value).shape
        return shape is not None and all(
            isinstance(size, int) or (size.value is not None and evaluate_dimension(str(size.value), sizes) is not None)
            for size in shape
        )

    def _size_of(self, dimension: ir.SymbolicDim) -> int:
        found = None if dimension.value is None else evaluate_dimension(str(dimension.value), self._sizes)
        return DEFAULT_SIZE if found is None else found

    def bytes(self, value: ir.Value) -> float:
        """The memory of a value; elements of unknown type count four bytes."""
        known = self._values.get(str(value.name), value)
        width = known.dtype.itemsize if known.dtype not in (None, ir.DataType.STRING) else 4
        return float(math.prod(self.of(value)) * width)


def _cost_of(node: ir.Node, roles: ValueRoles, shapes: _Shapes, kept: frozenset[ir.Value]) -> NodeCost:
    outputs = [value for value in node.outputs if value.name]
    output_bytes = sum(shapes.bytes(value) for value in outputs)
    read = [value for value in node.inputs if value is not None]
    forward = float(_operations(node, [shapes.of(v) for v in read], [shapes.of(v) for v in outputs]))
    factors = node.inputs[:4:3] if node.op_type == "Experts" else node.inputs[:2]
    through = [value for value in factors if value in roles.with_gradient]
    weights = [v for v in through if v is not None and roles.producers.get(v) not in roles.bound]
    moved = 0.0 if node.op_type in _VIEWS else output_bytes + sum(_bytes_read(node, v, shapes) for v in read)
    return NodeCost(
        forward=forward,
        backward_input=forward * (len(through) - len(weights)),
        backward_weight=forward * len(weights),
        moved_bytes=moved,
        kept_bytes=sum(shapes.bytes(value) for value in outputs if value in kept),
        output_bytes=output_bytes,
    )


def _bytes_read(node: ir.Node, value: ir.Value, shapes: _Shapes) -> float:
    """A table is not read in full by a lookup."""
    if node.op_type in ("Gather", "GatherND", "GatherElements") and value is node.inputs[0]:
        return 0.0
    return shapes.bytes(value)


def _operations(node: ir.Node, read: Sequence[tuple[int, ...]], made: Sequence[tuple[int, ...]]) -> float:
    """Operations of the forward pass that are products; all others are counted by the bytes they move."""
    kind, out = node.op_type, math.prod(made[0]) if made else 0
    if kind in ("MatMul", "MatMulBnb4", "MatMulInteger", "MatMulNBits", "Linear"):
        return 2.0 * out * (read[0][-1] if read[0] else 1)
    if kind == "Gemm":
        transposed = node.attributes.get("transA")
        axis = 0 if transposed is not None and transposed.as_int() else -1
        return 2.0 * out * (read[0][axis] if read[0] else 1)
    if kind in ("Conv", "ConvInteger", "DeformConv") and len(read) > 1:
        return 2.0 * out * math.prod(read[1][1:])
    if kind == "ConvTranspose" and len(read) > 1:
        return 2.0 * math.prod(read[0]) * math.prod(read[1][1:])
    if kind in ("RNN", "GRU", "LSTM") and len(read) > 2 and len(read[0]) == 3:
        return 2.0 * read[0][0] * read[0][1] * (math.prod(read[1]) + math.prod(read[2]))
    if kind == "Einsum":
        return _einsum_operations(node, read)
    if kind == "Experts":  # each choice of a token, or each slot, goes through the matrices of one expert
        has_choices = node.inputs[1] is not None
        of_all = sum(math.prod(shape) for shape in read[3 if has_choices else 1 :] if len(shape) > 1)
        rows = math.prod(read[1] if has_choices else read[0][:-1])
        return 2.0 * rows * of_all / node.attributes["experts"].as_int()
    if kind == "Attention" and len(read) > 2:
        query, keys = read[0], read[1]
        return 4.0 * math.prod(query) * (keys[-2] if len(keys) > 1 else 1)
    return 0.0


def _einsum_operations(node: ir.Node, read: Sequence[tuple[int, ...]]) -> float:
    equation = node.attributes["equation"].as_string().replace(" ", "").partition("->")[0]
    sizes: dict[str, int] = {}
    for letters, shape in zip(equation.split(","), read, strict=False):
        if "." not in letters:
            sizes |= dict(zip(letters, shape, strict=False))
    return 2.0 * math.prod(sizes.values())


def _kept_values(roles: ValueRoles) -> frozenset[ir.Value]:
    """Values that autograd holds from the forward to the backward pass; of a chain of views, the first."""
    kept: set[ir.Value] = set()
    for node in roles.nodes:
        operands = [value for value in node.inputs if value is not None]
        if not any(value in roles.with_gradient for value in operands):
            continue
        facts = operator(node.op_type).facts
        if Fact.KEEPS_INPUTS in facts:
            knows = node.op_type in _READS_REMATERIALIZED
            kept.update(_owner(v, roles) for v in operands if not (knows and _is_rematerialized(v, roles)))
        elif Fact.KEEPS_FACTORS in facts:
            for index, value in enumerate(operands[:2]):
                if _is_recomputed_input(node, index, roles):
                    continue
                if any(other in roles.with_gradient for place, other in enumerate(operands[:2]) if place != index):
                    kept.add(_owner(value, roles))
        if node.op_type == "Div" and operands[0] in roles.with_gradient:
            kept.add(_owner(operands[1], roles))
        # Dropout keeps a mask as large as its output.
        is_kept = Fact.KEEPS_OUTPUT in facts and not _is_rematerialized(node.outputs[0], roles)
        if is_kept or node.op_type == "Dropout":
            kept.add(node.outputs[0])
    return frozenset(value for value in kept if value in roles.producers)


def _is_recomputed_input(node: ir.Node, index: int, roles: ValueRoles) -> bool:
    """Whether an operand of a product with a weight is cheap to compute."""
    left, right = node.inputs[:2]
    if index or left is None or right is None or node.op_type not in ("MatMul", "Gemm", "Linear"):
        return False
    source, other = roles.producers.get(_owner(left, roles)), roles.producers.get(right)
    if source is None or not has_fact(source.op_type, Fact.RECOMPUTED) or (other is not None and other in roles.bound):
        return False
    widths = [_width(use.node) for use in left.uses() if use.idx == 0 and use.node.op_type == node.op_type]
    approximate = source.attributes["approximate"].as_string() if "approximate" in source.attributes else "none"
    outputs = sum(width or 0 for width in widths)
    return None in widths or is_worth_recomputing(source.op_type, outputs, approximate)


def _width(layer: ir.Node) -> int | None:
    """How many outputs a linear layer has, by its weight; None: not known."""
    weight, is_turned = layer.inputs[1], False
    for name in ("transB", "rows_are_outputs"):
        is_turned |= name in layer.attributes and bool(layer.attributes[name].as_int())
    producer = None if weight is None else weight.producer()
    if producer is not None and producer.op_type == "Transpose":
        weight, is_turned = producer.inputs[0], not is_turned
    shape = None if weight is None else weight.shape
    width = None if shape is None or len(shape) != 2 else shape[0 if is_turned else 1]
    return width if isinstance(width, int) else None


def _is_rematerialized(value: ir.Value, roles: ValueRoles) -> bool:
    """Whether a value is a batch normalization's, a sum with one, or the activation of either."""
    node = roles.producers.get(value)
    if node is not None and node.op_type in ("Relu", "HardSwish", "Swish", "Clip") and node.inputs[0] is not None:
        node = roles.producers.get(node.inputs[0])
    if node is None or node.op_type != "Add":
        return node is not None and node.op_type == "BatchNormalization"
    sources = [roles.producers.get(operand) for operand in node.inputs if operand is not None]
    return any(source is not None and source.op_type == "BatchNormalization" for source in sources)


def _owner(value: ir.Value, roles: ValueRoles) -> ir.Value:
    node = roles.producers.get(value)
    while node is not None and node.op_type in _VIEWS - {"Transpose"} and node.inputs and node.inputs[0] is not None:
        value = node.inputs[0]
        node = roles.producers.get(value)
    return value

"""What compiling a network would save on a CPU and take, estimated from its graph: the passes over memory of operators
that torch's compiler joins into one, and the kinds of nodes that it reads."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.operators import Fact, operators_with
from onward.graph.training_graph import TrainingGraph
from onward.lowering.kernels.layout import MOST_SMALL_CHANNELS, pays
from onward.plan.costs.costs import OPERATIONS_PER_BYTE, GraphCosts
from onward.plan.roles import node_id

_BROADCASTING = operators_with(Fact.BROADCASTING)

_REDUCTIONS = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare",
})  # fmt: skip

_VIEWS = operators_with(Fact.SAME_ELEMENTS | Fact.VIEW)
"""What only renames elements: compiled code reads through it."""

_JOINED = (operators_with(Fact.UNARY | Fact.NORMALIZATION) | _BROADCASTING | _REDUCTIONS | {
    "Clip", "Concat", "Dropout", "Gelu", "LogSoftmax", "Pad", "RotaryEmbedding", "Softmax", "SwiGLU",
}) - _VIEWS  # fmt: skip
"""What the compiler joins with its neighbors into one pass over memory."""

_KERNELS = {"RMSNormalization": 3, "RotaryEmbedding": 3, "SwiGLU": 2}
"""Operators that torch computes by several kernels, each of which passes over the values; others take one."""

_CONVOLUTIONS = operators_with(Fact.CONVOLUTION)

_LOST_WITH_FEW_CHANNELS = 2.5
"""Of the time of a convolution of so few channels that they are better not last, as compiled code has them."""

_PASSES = 3
"""Over the values of a node: one forward, and about two backward."""

_OPERATIONS_PER_SECOND = 1.5e11
"""Of one core in fp32."""

_SECONDS_TO_BEGIN, _SECONDS_A_KIND, _SECONDS_A_CONVOLUTION = 9.0, 0.15, 1.0
"""Of the compiler, on one core: least squares of the first steps of 132 networks of the census (8 to 236 s), which took
0.5 to 3.5 times as long as estimated. A convolution took 1.5 s then; since its call is optimized less, 0.95 by 18 of
them, beside other work (0.85 to 2.1 times as estimated)."""


@dataclass(frozen=True)
class CompilationGain:
    """Estimates for a step, and for what comes before the first.

    Attributes:
        seconds: what it takes uncompiled, on one core.
        saved_seconds: what passes over memory take that compiled code would not make, less what convolutions of
            few channels lose.
        compiling_seconds: what the first step takes longer where nothing is in the compiler's cache, once.
    """

    seconds: float
    saved_seconds: float
    compiling_seconds: float

    @property
    def saved_share(self) -> float:
        """Of a step's time."""
        return self.saved_seconds / self.seconds if self.seconds else 0.0


def estimate_gain(graph: TrainingGraph, costs: GraphCosts) -> CompilationGain:
    """Counts the bytes that joined operators pass on to each other through memory.

    Args:
        graph: what is trained.
        costs: of a micro-batch.
    """
    nodes = [node for node in graph.model.graph if node_id(node) in costs.nodes]
    joined = {node for node in nodes if node.op_type in _JOINED}
    seconds, lost = 0.0, 0.0
    for node in nodes:
        cost = costs.nodes[node_id(node)]
        products = cost.forward + cost.backward_input + cost.backward_weight
        taken = _seconds_to_move(_moved_bytes(node, costs)) + products / _OPERATIONS_PER_SECOND
        seconds += taken
        if node.op_type in _CONVOLUTIONS and _has_few_channels(node) and not _stays(node, costs):
            lost += taken * _LOST_WITH_FEW_CHANNELS
    moved_bytes = sum(_moved_bytes(node, costs) for node in joined)
    return CompilationGain(
        seconds=seconds,
        saved_seconds=max(0.0, _seconds_to_move(moved_bytes - _crossing_bytes(joined, costs)) - lost),
        compiling_seconds=_compiling_seconds(nodes, costs),
    )


def _compiling_seconds(nodes: Sequence[ir.Node], costs: GraphCosts) -> float:
    """Nodes that are alike, as those of repeated layers, are compiled once; convolutions differ between stages."""
    kinds = {_kind(node, costs) for node in nodes}
    convolutions = sum(node.op_type in _CONVOLUTIONS for node in nodes)
    return _SECONDS_TO_BEGIN + _SECONDS_A_KIND * len(kinds) + _SECONDS_A_CONVOLUTION * convolutions


def _kind(node: ir.Node, costs: GraphCosts) -> Hashable:
    """An operator, its attributes and the shapes of all that it reads and writes."""
    shapes = [None if value is None else costs.shapes.get(str(value.name)) for value in (*node.inputs, *node.outputs)]
    return (node.op_type, str(shapes), str(sorted(str(attribute) for attribute in node.attributes.values())))


def _seconds_to_move(forward_bytes: float) -> float:
    return _PASSES * forward_bytes * OPERATIONS_PER_BYTE / _OPERATIONS_PER_SECOND


def _moved_bytes(node: ir.Node, costs: GraphCosts) -> float:
    return costs.nodes[node_id(node)].moved_bytes * _KERNELS.get(node.op_type, 1)


def _bytes_of(value: ir.Value, costs: GraphCosts) -> float:
    return costs.value_bytes.get(str(value.name), 0.0)


def _crossing_bytes(joined: set[ir.Node], costs: GraphCosts) -> float:
    """What joined operators as a whole read and write in a pass forward."""
    read = {_origin(value) for node in joined for value in node.inputs if value is not None}
    read = {value for value in read if value.producer() not in joined}
    written = {value for node in joined for value in node.outputs if _is_read_outside(value, joined)}
    return sum(_bytes_of(value, costs) for value in (*read, *written))


def _origin(value: ir.Value) -> ir.Value:
    """What a value is a view of, or itself."""
    node = value.producer()
    while node is not None and node.op_type in _VIEWS and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _is_read_outside(value: ir.Value, joined: set[ir.Node]) -> bool:
    """Whether a value, or a view of it, is read by anything but joined operators."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        readers = [node for node, _ in one.uses()]
        if one.is_graph_output() or any(node not in joined and node.op_type not in _VIEWS for node in readers):
            return True
        waiting += [view for node in readers if node.op_type in _VIEWS for view in node.outputs]
    return False


def _has_few_channels(convolution: ir.Node) -> bool:
    weight = convolution.inputs[1].shape if convolution.inputs[1] is not None else None
    if weight is None or len(weight) < 2:
        return False
    return all(isinstance(n, int) and n <= MOST_SMALL_CHANNELS for n in weight.dims[:2])


def _stays(convolution: ir.Node, costs: GraphCosts) -> bool:
    """Whether its images are so small that compiled code leaves the channels first, too."""
    image, weight = (costs.shapes[str(value.name)] for value in convolution.inputs[:2] if value is not None)
    if convolution.op_type != "Conv" or len(image) != 4:
        return False
    return not pays(image, weight, convolution.attributes.get_ints("strides", [1, 1]))

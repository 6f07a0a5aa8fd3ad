"""What compiling a network would save on a CPU, estimated from its graph: the passes over memory of operators that
torch's compiler joins into one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.operators import Fact, operators_with
from onward.graph.training_graph import TrainingGraph
from onward.plan.costs.costs import OPERATIONS_PER_BYTE, GraphCosts
from onward.plan.roles import node_id

_BROADCASTING = operators_with(Fact.BROADCASTING)

_REDUCTIONS = frozenset({
    "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare",
})  # fmt: skip

_JOINED = operators_with(Fact.UNARY) | _BROADCASTING | _REDUCTIONS | {
    "Clip", "Concat", "Dropout", "Gelu", "LayerNormalization", "LogSoftmax", "Pad", "RMSNormalization",
    "RotaryEmbedding", "Slice", "Softmax", "SwiGLU",
}  # fmt: skip
"""What the compiler joins with its neighbors into one pass over memory."""

_KERNELS = {"RMSNormalization": 3, "RotaryEmbedding": 3, "SwiGLU": 2}
"""Operators that torch computes by several kernels, each of which passes over the values; others take one."""

_SLOWER = operators_with(Fact.CONVOLUTION) | {
    "AveragePool", "CumProd", "CumSum", "EmbeddingBag", "MaxPool", "Scatter", "ScatterElements", "ScatterND", "TopK",
    "Unique",
}  # fmt: skip
"""What a CPU computes as fast or slower in compiled code: sorts with running sums took twice as long."""

_PASSES = 3
"""Over the values of a node: one forward, and about two backward."""

_OPERATIONS_PER_SECOND = 1.5e11
"""Of one core in fp32."""


@dataclass(frozen=True)
class CompilationGain:
    """Estimates for an update.

    Attributes:
        seconds: what it takes uncompiled, on one core.
        saved_seconds: what passes over memory take that compiled code would not make.
        slower_seconds: kind of operator -> what its nodes take that compiled code computes more slowly. Of a Transpose
            that moves the last axis, what joined operators take to read it: their rows are no vectors in memory.
    """

    seconds: float
    saved_seconds: float
    slower_seconds: Mapping[str, float]

    @property
    def saved_share(self) -> float:
        """Of an update's time."""
        return self.saved_seconds / self.seconds if self.seconds else 0.0

    @property
    def slower_share(self) -> float:
        """Of an update's time."""
        return sum(self.slower_seconds.values()) / self.seconds if self.seconds else 0.0


def estimate_gain(graph: TrainingGraph, costs: GraphCosts) -> CompilationGain:
    """Counts the bytes that joined operators pass on to each other through memory.

    Args:
        graph: what is trained.
        costs: of a micro-batch.
    """
    nodes = [node for node in graph.model.graph if node_id(node) in costs.nodes]
    joined = {node for node in nodes if node.op_type in _JOINED}
    seconds, slower = 0.0, defaultdict[str, float](float)
    for node in nodes:
        cost = costs.nodes[node_id(node)]
        products = cost.forward + cost.backward_input + cost.backward_weight
        taken = _seconds_to_move(_moved_bytes(node, costs)) + products / _OPERATIONS_PER_SECOND
        seconds += taken
        if node.op_type in _SLOWER:
            slower[node.op_type] += taken
        elif _moves_last_axis(node):
            readers = sum(user in joined for user, _ in node.outputs[0].uses())
            slower[node.op_type] += readers * _seconds_to_move(_bytes_of(node.outputs[0], costs))
    moved_bytes = sum(_moved_bytes(node, costs) for node in joined)
    return CompilationGain(
        seconds=seconds,
        saved_seconds=_seconds_to_move(max(0.0, moved_bytes - _crossing_bytes(joined, costs))),
        slower_seconds={kind: one for kind, one in slower.items() if one},
    )


def _seconds_to_move(forward_bytes: float) -> float:
    return _PASSES * forward_bytes * OPERATIONS_PER_BYTE / _OPERATIONS_PER_SECOND


def _moved_bytes(node: ir.Node, costs: GraphCosts) -> float:
    return costs.nodes[node_id(node)].moved_bytes * _KERNELS.get(node.op_type, 1)


def _bytes_of(value: ir.Value, costs: GraphCosts) -> float:
    return costs.value_bytes.get(str(value.name), 0.0)


def _crossing_bytes(joined: set[ir.Node], costs: GraphCosts) -> float:
    """What joined operators as a whole read and write in a pass forward."""
    read = {value for node in joined for value in node.inputs if value is not None and value.producer() not in joined}
    written = {
        value
        for node in joined
        for value in node.outputs
        if value.is_graph_output() or any(user not in joined for user, _ in value.uses())
    }
    return sum(_bytes_of(value, costs) for value in (*read, *written))


def _moves_last_axis(node: ir.Node) -> bool:
    if node.op_type != "Transpose":
        return False
    order = node.attributes.get("perm")
    return order is None or order.as_ints()[-1] != len(order.as_ints()) - 1

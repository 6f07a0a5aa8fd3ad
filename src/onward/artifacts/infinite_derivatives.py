"""Whether gradients of a network may be infinite at zero, as that of a square root of what a ReLU gives."""

from __future__ import annotations

import onnx_ir as ir

_INFINITE = frozenset(
    [
        *("Acos", "Acosh", "Asin", "Atanh", "Log", "LpNormalization", "LpPool", "Pow", "Reciprocal"),
        *("ReduceL2", "ReduceLogSum", "Sqrt"),
    ]
)


def has_infinite_derivatives(model: ir.Model) -> bool:
    """Whether a model has an operator whose derivative is infinite somewhere, or divides by what it computes.

    torch sets such a gradient to zero where an activation in front of it is clipped.
    """
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    nodes = (node for graph in graphs for node in ir.traversal.RecursiveGraphIterator(graph))
    return any(node.op_type in _INFINITE or _divides_by_computed(node) for node in nodes)


def _divides_by_computed(node: ir.Node) -> bool:
    divisor = node.inputs[1] if node.op_type == "Div" else None
    return divisor is not None and ir.convenience.get_const_tensor(divisor) is None

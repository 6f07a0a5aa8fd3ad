"""Whether gradients of a network may be infinite: in fp16, or at zero, as of a square root of what a ReLU gives."""

from __future__ import annotations

import onnx_ir as ir

_INFINITE = frozenset(
    [
        *("Acos", "Acosh", "Asin", "Atanh", "Log", "LpNormalization", "LpPool", "Pow", "Reciprocal"),
        *("ReduceL2", "ReduceLogSum", "Sqrt"),
    ]
)


def gradients_may_be_infinite(model: ir.Model, is_lowered: bool) -> bool:
    """Whether masks of clipped activations have to be choices: a product of 0 and an infinite gradient is NaN.

    Args:
        model: the network with its loss.
        is_lowered: whether it computes in 16 bits, where a scaled loss makes gradients that are too large for fp16.
            Those behind a clipped activation count for nothing, and are no reason to skip an update.
    """
    half = ir.DataType.FLOAT16
    is_half = any(value.dtype is half for value in (*model.graph.inputs, *model.graph.initializers.values()))
    return is_lowered or is_half or has_infinite_derivatives(model)


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

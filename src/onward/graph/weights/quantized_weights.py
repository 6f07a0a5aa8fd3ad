"""What of a quantized model cannot train as it is: scales that belong to integers, and weights stored as integers."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.operators import operator

INTEGERS: dict[ir.DataType, str] = {
    **dict.fromkeys((ir.DataType.INT8, ir.DataType.UINT8), "8-bit integers"),
    **dict.fromkeys((ir.DataType.INT4, ir.DataType.UINT4), "4-bit integers"),
    **dict.fromkeys(
        (
            ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E4M3FNUZ, ir.DataType.FLOAT8E5M2, ir.DataType.FLOAT8E5M2FNUZ,
        ),
        "8-bit floats",
    ),
}  # fmt: skip
"""Element types of quantized weights, in words."""

PACKED = frozenset({"MatMulNBits", "MatMulBnb4"})
"""Products that read a weight in packed blocks, at input 1."""

UNPACKING = frozenset({"DequantizeNBits", "DequantizeBnb4"})
"""Operators of the domain `onward.fused` that give the matrix which packed blocks, at input 0, stand for."""

_PRODUCTS = frozenset({"MatMulInteger", "ConvInteger"})
_STORED_RIGHT = PACKED | {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}


def is_scale(value: ir.Value) -> bool:
    """Whether every node that reads an initializer takes it for the scale of quantized numbers."""
    uses = value.uses()
    return bool(uses) and all(_reads_scale(use.node, use.idx) for use in uses)


def _reads_scale(node: ir.Node, index: int) -> bool:
    if operator(node.op_type).input(index) == "scale":
        return True
    if node.op_type != "Mul" or node.domain != "":
        return False
    other = node.inputs[1 - index]
    return other is not None and _is_of_integers(other.producer(), other)


def _is_of_integers(producer: ir.Node | None, value: ir.Value) -> bool:
    """Whether a value is the scale found for an activation, or a product of integers that is still to be scaled."""
    if producer is None:
        return False
    if producer.op_type == "DynamicQuantizeLinear":
        return value is producer.outputs[1]
    if producer.op_type == "Cast" and producer.inputs[0] is not None:
        before = producer.inputs[0].producer()
        return before is not None and before.op_type in _PRODUCTS
    return False


def quantized_weights(graph: ir.Graph) -> dict[str, str]:
    """Stored integers (or FP8) that stand for weights, each with the reason why they do not train.

    What an operator reads as a single number, a zero point, is none.
    """
    found = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        kind = None if tensor is None else INTEGERS.get(tensor.dtype)
        if tensor is None or kind is None or tensor.size < 2 or not _holds_weights(value):
            continue
        found[name] = f"a weight stored as {kind}"
    return found


def _holds_weights(value: ir.Value) -> bool:
    return any(
        (use.node.op_type in UNPACKING | {"DequantizeLinear"} and use.idx == 0)
        or (use.node.op_type in _PRODUCTS and use.idx in (0, 1))
        or (use.node.op_type in ("QLinearMatMul", "QLinearConv", "QGemm") and use.idx == 3)
        or (use.node.op_type in _STORED_RIGHT and use.idx == 1)
        or (use.node.op_type == "GatherBlockQuantized" and use.idx == 0)
        or (use.node.op_type == "DynamicQuantizeLSTM" and use.idx in (1, 2))
        or (use.node.op_type in ("Transpose", "Reshape", "Gather") and _moves_to_dequantize(use.node))
        for use in value.uses()
    )


def _moves_to_dequantize(node: ir.Node) -> bool:
    return any(use.node.op_type == "DequantizeLinear" and use.idx == 0 for use in node.outputs[0].uses())

"""Where quantized values go: whether a quantized tensor is only ever dequantized again, or multiplied to real numbers.

Such a tensor need not be stored as integers while a model trains, so that a gradient can pass through it
(quantization-aware training).
"""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes.structure import MICROSOFT

_MOVES_ELEMENTS = frozenset(
    {
        "Clip", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice",
        "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators whose outputs hold nothing but elements of their first input, or its bounds."""


_TENSORS_OF_PRODUCTS = {
    ("", "MatMulInteger"): (0, 1),
    ("", "ConvInteger"): (0, 1),
    (MICROSOFT, "MatMulIntegerToFloat"): (0, 1),
    (MICROSOFT, "QAttention"): (0,),
    (MICROSOFT, "QGemm"): (0, 3),
}
"""Operator -> inputs that hold quantized tensors and are multiplied."""
_REAL = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def is_only_dequantized(value: ir.Value) -> bool:
    """Whether every element of a quantized value reaches only `DequantizeLinear`, or products that give real numbers.

    Operators that move elements may be between; the value may be an output of no graph.
    """
    uses = value.uses()
    if not uses or value.is_graph_output():
        return False
    for node, index in uses:
        if index in _TENSORS_OF_PRODUCTS.get((node.domain, node.op_type), ()) and gives_real_numbers(node):
            continue
        if node.domain != "" or index != 0:
            return False
        if node.op_type == "DequantizeLinear":
            continue
        if node.op_type not in _MOVES_ELEMENTS:
            return False
        used = [output for output in node.outputs if output.uses() or output.is_graph_output()]
        if node.op_type == "MaxPool" and (len(used) != 1 or used[0] is not node.outputs[0]):
            return False
        if not used or not all(is_only_dequantized(output) for output in used):
            return False
    return True


def gives_real_numbers(node: ir.Node) -> bool:
    """Whether a product of quantized tensors gives real numbers, or int32 that is only cast to such."""
    if node.op_type == "QGemm":
        return len(node.inputs) < 8 or node.inputs[7] is None
    if node.domain == MICROSOFT:
        return node.op_type in ("MatMulIntegerToFloat", "QAttention")
    output = node.outputs[0]
    return bool(output.uses()) and not output.is_graph_output() and all(_casts_to_real(use) for use, _ in output.uses())


def _casts_to_real(node: ir.Node) -> bool:
    to = node.attributes.get("to")
    return node.op_type == "Cast" and to is not None and ir.DataType(to.as_int()) in _REAL

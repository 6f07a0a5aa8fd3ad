"""Where quantized values go: whether a quantized tensor is only ever dequantized again.

Such a tensor need not be stored as integers while a model trains, so that a gradient can pass through it
(quantization-aware training).
"""

from __future__ import annotations

import onnx_ir as ir

_MOVES_ELEMENTS = frozenset(
    {
        "Clip", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Reshape", "Slice",
        "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators whose outputs hold nothing but elements of their first input, or its bounds."""


def is_only_dequantized(value: ir.Value) -> bool:
    """Whether every element of a quantized value reaches only `DequantizeLinear`, as the tensor to dequantize.

    Operators that move elements may lie between; the value may be an output of no graph.
    """
    uses = value.uses()
    if not uses or value.is_graph_output():
        return False
    for node, index in uses:
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

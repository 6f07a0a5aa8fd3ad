"""Which quantized values may stay floats while a model trains: those that only ever are dequantized again."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from onward.graph.weights.quantization import is_only_dequantized

DEQUANTIZE = helper.make_node("DequantizeLinear", ["m", "s"], ["y"])
CASES = {
    "directly": ([helper.make_node("DequantizeLinear", ["q", "s"], ["y"])], ["y"], True),
    "twice": (
        [
            helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
            helper.make_node("DequantizeLinear", ["q", "s"], ["w"]),
        ],
        ["y", "w"],
        True,
    ),
    "moved": ([helper.make_node("Transpose", ["q"], ["m"]), DEQUANTIZE], ["y"], True),
    "pooled": (
        [helper.make_node("MaxPool", ["q"], ["m"], kernel_shape=[2]), DEQUANTIZE],
        ["y"],
        True,
    ),
    "pooled with positions": (
        [helper.make_node("MaxPool", ["q"], ["m", "positions"], kernel_shape=[2]), DEQUANTIZE],
        ["y", "positions"],
        False,
    ),
    "split, one part left": ([helper.make_node("Split", ["q"], ["m", "rest"], num_outputs=2), DEQUANTIZE], ["y"], True),
    "split, one part given out": (
        [helper.make_node("Split", ["q"], ["m", "rest"], num_outputs=2), DEQUANTIZE],
        ["y", "rest"],
        False,
    ),
    "given out": ([helper.make_node("DequantizeLinear", ["q", "s"], ["y"])], ["y", "q"], False),
    "as a zero point": ([helper.make_node("DequantizeLinear", ["x", "s", "q"], ["y"])], ["y"], False),
    "computed with": ([helper.make_node("MatMulInteger", ["q", "q"], ["y"])], ["y"], False),
    "by another domain": ([helper.make_node("DequantizeLinear", ["q", "s"], ["y"], domain="other")], ["y"], False),
    "unused": ([helper.make_node("Relu", ["x"], ["y"])], ["y"], False),
}


@pytest.mark.parametrize("name", CASES)
def test_where_a_quantized_value_goes(name: str) -> None:
    nodes, outputs, expected = CASES[name]
    quantize = helper.make_node("QuantizeLinear", ["x", "s"], ["q"])
    graph = helper.make_graph(
        [quantize, *nodes],
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4]), helper.make_tensor_value_info("s", 1, [])],
        [helper.make_empty_tensor_value_info(output) for output in outputs],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    assert is_only_dequantized(model.graph.node(0).outputs[0]) is expected

"""What cannot be written in real numbers stays, and is named."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from onward.graph.dequantization.passes import dequantize
from tests.graph.dequantization.integer_models import integer_model


def test_what_cannot_be_written_stays_and_is_named() -> None:
    """A weight that is computed while the network runs has no float in its place; scales per channel need opset 13."""
    model = integer_model()
    model.opset_import[0].version = 12
    result = dequantize(model)
    assert {node.op_type for node in result.model.graph} == {"QuantizeLinear", "DequantizeLinear", "Conv"}
    assert "kernel" in result.model.graph.initializers
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    computed = integer_model()
    computed.graph.node[1].input[4] = "x"  # scales that are not stored
    computed.graph.initializer.append(numpy_helper.from_array(np.ones((2, 2), np.int8), "other"))
    computed.graph.node.append(onnx.helper.make_node("DequantizeLinear", ["other", "s"], ["o"]))
    computed.graph.output.append(onnx.helper.make_tensor_value_info("o", 1, [2, 2]))
    assert "Not dequantized, without a gradient: node 'conv' (QLinearConv)." in dequantize(computed).describe()

"""Stored integers as the real numbers that they stand for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onward.graph.dequantization.passes import dequantize
from tests.graph.dequantization.integer_models import integer_model
from tests.initializers import stored_arrays


@pytest.mark.parametrize("channels_last", [False, True])
def test_restored_weights_are_what_the_integers_stand_for(channels_last: bool) -> None:
    model = integer_model(channels_last)
    stored = stored_arrays(model)
    result = dequantize(model)
    weights = {name: value.const_value.numpy() for name, value in result.model.graph.initializers.items()}
    real = stored["kernel_quantized"].astype(np.float32) * stored["ws"].reshape(3, 1, 1, 1)
    np.testing.assert_array_equal(weights["kernel"], real)
    np.testing.assert_allclose(weights["bias"], stored["bias_quantized"] * stored["ws"] * 0.05, rtol=1e-6)
    assert "com.microsoft" not in result.model.opset_imports
    x = np.random.default_rng(2).normal(size=(1, 6, 6, 2) if channels_last else (1, 2, 6, 6)).astype(np.float32)
    outputs = [
        onnxruntime.InferenceSession(one.SerializeToString()).run(None, {"x": x})[0]
        for one in (model, ir.to_proto(result.model))
    ]
    np.testing.assert_allclose(outputs[0], outputs[1], atol=0.2001, rtol=0)  # a step of the output: 0.2
    assert (outputs[0] == outputs[1]).mean() > 0.95
    assert result.describe() == ("1 QLinearConv dequantized; 54 stored integers are now float32 parameters.")

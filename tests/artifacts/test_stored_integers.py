"""Integers in place of trained weights: what they are, whether one scale or many, and biases of 32 bits."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper, parser

from onward.artifacts.stored_integers import store_integers
from onward.graph.quantize_aware.quantizers import Quantizer
from tests.initializers import stored_arrays

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 4)).astype(np.float32)


def quantizer(value: str, axis: int | None = None) -> Quantizer:
    return Quantizer(
        value=value, scale=f"{value}_scale", zero_point=f"{value}_zero", is_weight=value == "w", axis=axis, largest=127,
        is_signed=True, elements=4, is_calibrated=True, observer="lsq",
    )  # fmt: skip


def model_of(bias: np.ndarray, scale: np.ndarray, axis: int = 0) -> onnx.ModelProto:
    model = parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 19]> net (float[N, 4] x) => (float[N, 3] y)
        {{ p = QuantizeLinear (x, x_scale, x_zero) q = DequantizeLinear (p, x_scale, x_zero)
           v = QuantizeLinear <axis = {axis}> (w, w_scale, w_zero)
           u = DequantizeLinear <axis = {axis}> (v, w_scale, w_zero) y = Gemm <transB = 1> (q, u, b) }}"""
    )
    tensors = {
        "w": RNG.normal(size=(3, 4)).astype(np.float32), "w_scale": scale, "w_zero": np.zeros(scale.shape, np.int8),
        "x_scale": np.array(0.02, np.float32), "x_zero": np.array(3, np.int8), "b": bias,
    }  # fmt: skip
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return model


def computed(model: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": X})[0])


def stored(model: onnx.ModelProto, axis: int | None) -> onnx.ModelProto:
    form = ir.from_proto(model)
    store_integers(form, [quantizer("x"), quantizer("w", axis)])
    changed = ir.to_proto(form)
    onnx.checker.check_model(changed, full_check=True)
    return changed


@pytest.mark.parametrize(
    ("bias", "scale", "axis"),
    [
        pytest.param([0.3, -0.2, 2.0], 0.01, None, id="one scale"),
        pytest.param([0.3, -0.2, 2.0], [0.01, 0.02, 0.03], 0, id="a scale per channel"),
        pytest.param([0.3], 0.01, None, id="one number for all channels"),
        pytest.param([0.3], [0.01, 0.02, 0.03], 0, id="one number and a scale per channel"),
    ],
)
def test_integers_compute_the_same(bias: list[float], scale: float | list[float], axis: int | None) -> None:
    model = model_of(np.array(bias, np.float32), np.array(scale, np.float32), axis or 0)
    changed = stored(model, axis)
    arrays = stored_arrays(changed)
    assert arrays["v"].dtype == np.int8
    assert "w" not in arrays
    np.testing.assert_allclose(computed(changed), computed(model), atol=1e-3)


def test_biases_become_integers_of_32_bits() -> None:
    scale = np.array([0.01, 0.02, 0.03], np.float32)
    changed = stored(model_of(np.array([0.3, -0.2, 1e9], np.float32), scale), 0)
    arrays = stored_arrays(changed)
    assert arrays["b_quantized"].tolist() == [1500, -500, 2**31 - 1]
    np.testing.assert_array_equal(arrays["b_scale"], np.float32(0.02) * scale)


def test_nothing_is_done_without_quantizers() -> None:
    form = ir.from_proto(model_of(np.zeros(3, np.float32), np.array(0.01, np.float32)))
    before = ir.to_proto(form).SerializeToString()
    store_integers(form, [])
    assert ir.to_proto(form).SerializeToString() == before

"""Quantized operators of com.microsoft equal onnxruntime's CPU kernels to one step of the quantized type."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onward
from tests.one_node import check_against_onnxruntime, make_model, run, run_onnxruntime, to_array

RANDOM = np.random.default_rng(0)
MICROSOFT = "com.microsoft"
SCALES = {"x": np.float32(0.05), "y": np.float32(0.08), "z": np.float32(0.1)}
POINTS = {np.uint8: {"x": 120, "y": 131, "z": 127}, np.int8: {"x": -3, "y": 4, "z": 1}}


def _quantized(dtype: Any, *shape: int) -> np.ndarray[Any, Any]:
    limits = np.iinfo(dtype)
    return RANDOM.integers(limits.min, limits.max + 1, shape).astype(dtype)


def _check(op_type: str, inputs: dict[str, Any], attributes: dict[str, Any] | None = None, steps: int = 1) -> None:
    """Equal but for rounding: at most `steps` of the quantized type."""
    model = make_model(op_type, inputs, attributes, 20, domain=MICROSOFT)
    given = [np.asarray(value) for value in inputs.values() if value is not None]
    expected, actual = run_onnxruntime(model, *given)[0], to_array(run(model, *given))
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert np.abs(actual.astype(int) - expected.astype(int)).max() <= steps


def _tensor(name: str, letter: str, value: Any, dtype: Any) -> dict[str, Any]:
    point = np.array(POINTS[dtype][letter], dtype)
    return {name: value, f"{name}_scale": np.array(SCALES[letter]), f"{name}_zero_point": point}


def _result(name: str, letter: str, dtype: Any) -> dict[str, Any]:
    return {k: v for k, v in _tensor(name, letter, None, dtype).items() if k != name}


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("op_type", ["QLinearAdd", "QLinearMul"])
def test_two_quantized_tensors(op_type: str, dtype: Any) -> None:
    left, right = _quantized(dtype, 2, 3, 4), _quantized(dtype, 3, 4)
    _check(op_type, _tensor("A", "x", left, dtype) | _tensor("B", "y", right, dtype) | _result("C", "z", dtype))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        ("QLinearSigmoid", {}),
        ("QLinearLeakyRelu", {"alpha": 0.2}),
        ("QLinearSoftmax", {"axis": -1, "opset": 13}),
        ("QLinearSoftmax", {"axis": 1, "opset": 11}),
        ("QLinearGlobalAveragePool", {}),
        ("QLinearGlobalAveragePool", {"channels_last": 1}),
        ("QLinearAveragePool", {"kernel_shape": [2, 2], "strides": [2, 1]}),
        ("QLinearAveragePool", {"kernel_shape": [2, 2], "pads": [1, 0, 1, 0], "channels_last": 1}),
    ],
)
def test_one_quantized_tensor(op_type: str, attributes: dict[str, Any], dtype: Any) -> None:
    x = _tensor("X", "x", _quantized(dtype, 1, 4, 4, 3), dtype)
    y = _result("Y", "z", dtype)
    if op_type in ("QLinearSigmoid", "QLinearSoftmax"):
        y["Y_scale"] = np.array(np.float32(1 / 256))
        y["Y_zero_point"] = np.array(np.iinfo(dtype).min, dtype)
    _check(op_type, x | y, attributes)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_choice(dtype: Any) -> None:
    inputs = {"condition": RANDOM.random((3, 1)) < 0.5}
    for name, letter in (("X", "x"), ("Y", "y")):
        inputs |= {name: _quantized(dtype, 3, 4), f"{letter}_scale": np.array(SCALES[letter])}
        inputs[f"{letter}_zero_point"] = np.array(POINTS[dtype][letter], dtype)
    _check("QLinearWhere", inputs | _result("z", "z", dtype))


def test_concatenation() -> None:
    a, b = _quantized(np.uint8, 2, 3), _quantized(np.uint8, 2, 2)
    parts = _tensor("A", "x", a, np.uint8) | _tensor("B", "y", b, np.uint8)
    _check("QLinearConcat", _result("Y", "z", np.uint8) | parts, {"axis": 1})


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("per_column", [True, False])
def test_gemm(per_column: bool, quantized: bool) -> None:
    a, b = _quantized(np.uint8, 3, 4), _quantized(np.uint8, 5, 4)
    inputs: dict[str, Any] = {"A": a, "a_scale": np.array(SCALES["x"]), "a_zero_point": np.array(120, np.uint8), "B": b}
    columns = 5 if per_column else 1
    inputs["b_scale"] = RANDOM.random(columns).astype(np.float32) * 0.02 + 0.01
    inputs["b_zero_point"] = RANDOM.integers(100, 140, columns).astype(np.uint8)
    inputs["C"] = RANDOM.integers(-500, 500, 5).astype(np.int32)
    attributes = {"transB": 1, "alpha": 0.5}
    if quantized:
        inputs |= {"y_scale": np.array(np.float32(0.7)), "y_zero_point": np.array(128, np.uint8)}
        _check("QGemm", inputs, attributes)
    else:
        check_against_onnxruntime(
            make_model("QGemm", inputs, attributes, 20, domain=MICROSOFT), *inputs.values(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("per_column", [True, False])
def test_products_with_quantized_matrices(per_column: bool) -> None:
    columns = 5 if per_column else 1
    b = {"B": _quantized(np.uint8, 4, 5), "b_scale": RANDOM.random(columns).astype(np.float32) * 0.02 + 0.01}
    b["b_zero_point"] = RANDOM.integers(100, 140, columns).astype(np.uint8)
    bias = RANDOM.standard_normal(5).astype(np.float32)
    dynamic = {"A": RANDOM.standard_normal((2, 3, 4)).astype(np.float32), **b, "bias": bias}
    model = make_model("DynamicQuantizeMatMul", dynamic, {}, 20, domain=MICROSOFT)
    check_against_onnxruntime(model, *dynamic.values(), rtol=1e-4, atol=1e-4)
    static = {
        "A": _quantized(np.uint8, 2, 3, 4),
        "B": b["B"],
        "a_scale": np.array(SCALES["x"]),
        "b_scale": b["b_scale"],
        "a_zero_point": np.array(120, np.uint8),
        "b_zero_point": b["b_zero_point"],
        "bias": bias,
    }
    model = make_model("MatMulIntegerToFloat", static, {}, 20, domain=MICROSOFT)
    check_against_onnxruntime(model, *static.values(), rtol=1e-4, atol=1e-4)


def test_the_gradient_passes_the_rounding_of_a_dynamic_product() -> None:
    A = torch.randn(3, 4, requires_grad=True)
    B = torch.randint(0, 256, (4, 5), dtype=torch.uint8)
    inputs = {"A": A, "B": B, "b_scale": torch.tensor([0.01]), "b_zero_point": torch.tensor([128], dtype=torch.uint8)}
    weights = torch.randn(3, 5)
    Y = run(make_model("DynamicQuantizeMatMul", inputs, {}, 20, domain=MICROSOFT), *inputs.values())
    (Y * weights).sum().backward()
    torch.testing.assert_close(A.grad, weights @ ((B.float() - 128) * 0.01).T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("attributes", [{}, {"unidirectional": 1}])
def test_attention_of_quantized_input(attributes: dict[str, Any], masked: bool, columns: bool) -> None:
    scales = RANDOM.uniform(0.005, 0.01, 24).astype(np.float32) if columns else np.array(np.float32(0.01))
    inputs = {
        "x": _quantized(np.uint8, 2, 3, 8),
        "w": _quantized(np.int8, 8, 24),
        "bias": RANDOM.standard_normal(24).astype(np.float32),
        "x_scale": np.array(np.float32(0.02)),
        "w_scale": scales,
        "mask": np.array([[1, 1, 1], [1, 1, 0]], np.int32) if masked else None,
        "x_zero_point": np.array(120, np.uint8),
        "w_zero_point": np.zeros(24, np.int8) if columns else np.array(0, np.int8),
    }
    model = make_model("QAttention", inputs, {"num_heads": 2, **attributes}, 20, domain=MICROSOFT)
    given = [value for value in inputs.values() if value is not None]
    check_against_onnxruntime(model, *given, rtol=1e-4, atol=1e-5)


def _dynamic_lstm(dtype: Any, directions: int, per_column: bool, given: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a DynamicQuantizeLSTM: 3 sequences of 6 steps, 5 inputs, 4 hidden; `given` replaces some."""
    scales = (directions, 16) if per_column else (directions,)
    stored = {
        "W": _quantized(dtype, directions, 5, 16),
        "R": _quantized(dtype, directions, 4, 16),
        **{f"{name}_scale": RANDOM.random(scales).astype(np.float32) * 0.01 + 0.003 for name in "WR"},
        **{f"{name}_zero_point": np.full(scales, 128 if dtype is np.uint8 else 0, dtype) for name in "WR"},
    }
    optional = {"B": (directions, 32), "initial_h": (directions, 3, 4), "initial_c": (directions, 3, 4)}
    inputs = {"X": RANDOM.standard_normal((6, 3, 5)).astype(np.float32)}
    inputs |= {name: RANDOM.standard_normal(shape).astype(np.float32) * 0.3 for name, shape in optional.items()}
    order = "X W R B sequence_lens initial_h initial_c P W_scale W_zero_point R_scale R_zero_point"
    return {name: ({**inputs, **stored, **given}).get(name) for name in order.split()}


_STORED = ("W", "R", "W_scale", "W_zero_point", "R_scale", "R_zero_point")


def _dynamic_lstm_model(inputs: dict[str, Any], attributes: dict[str, Any]) -> tuple[Any, list[Any]]:
    """onnxruntime wants the weights stored; the model, and what remains to be given."""
    stored = {name: inputs[name] for name in _STORED}
    shown = {name: None if name in stored else value for name, value in inputs.items()}
    attributes = {"hidden_size": 4, **attributes}
    model = make_model("DynamicQuantizeLSTM", shown, attributes, 20, 3, initializers=stored, domain=MICROSOFT)
    return model, [value for value in shown.values() if value is not None]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize(
    ("directions", "per_column", "attributes", "given"),
    [
        (1, False, {}, {}),
        (1, True, {"direction": "reverse", "clip": 1.0}, {"B": None}),
        (2, True, {"direction": "bidirectional"}, {"P": np.full((2, 12), 0.3, np.float32), "initial_h": None}),
        (1, False, {"activations": ["HardSigmoid", "Relu", "Tanh"], "input_forget": 1}, {"initial_c": None}),
    ],
)
def test_lstm_quantized_as_it_runs(
    directions: int, per_column: bool, attributes: dict[str, Any], given: dict[str, Any], dtype: Any
) -> None:
    model, tensors = _dynamic_lstm_model(_dynamic_lstm(dtype, directions, per_column, given), attributes)
    check_against_onnxruntime(model, *tensors, rtol=1e-4, atol=1e-5)


def test_lstm_quantized_as_it_runs_over_sequences_of_several_lengths() -> None:
    """Hidden states of ended sequences count in our range of 8 bits and not in onnxruntime's: one step apart."""
    lengths = {"sequence_lens": np.array([4, 2, 3], np.int32), "X": np.full((6, 3, 5), 1e6, np.float32)}
    lengths["X"][:4] = RANDOM.standard_normal((4, 3, 5))
    inputs = _dynamic_lstm(np.uint8, 2, True, lengths)
    model, tensors = _dynamic_lstm_model(inputs, {"direction": "bidirectional"})
    check_against_onnxruntime(model, *tensors, rtol=0, atol=1 / 255)


def test_lstm_written_by_the_quantizer_of_onnxruntime() -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    draws = {"W": (1, 16, 5), "R": (1, 16, 4), "B": (1, 32)}
    stored = {name: RANDOM.standard_normal(shape).astype(np.float32) * 0.5 for name, shape in draws.items()}
    X = RANDOM.standard_normal((6, 3, 5)).astype(np.float32)
    model = make_model("LSTM", {"X": X}, {"hidden_size": 4}, 17, 3, initializers=stored)
    for value in model.graph.output:
        value.type.tensor_type.elem_type = 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quantized.onnx"
        quantize_dynamic(model, path, weight_type=QuantType.QInt8)
        quantized = onnx.load(path)
    assert [node.op_type for node in quantized.graph.node] == ["DynamicQuantizeLSTM"]
    check_against_onnxruntime(quantized, X, rtol=1e-4, atol=1e-5)
    assert "B" in onward.to_torch(quantized).weights


def _fake_quantized(x: torch.Tensor) -> torch.Tensor:
    """torch's own straight-through rounding to 8 bits of the tensor's range."""
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    scale = (high - low) / 255 or 1.0
    return torch.fake_quantize_per_tensor_affine(x, scale, round(-low / scale), 0, 255)


def test_the_gradient_passes_the_rounding_of_every_step() -> None:
    inputs = {k: None if v is None else torch.from_numpy(v) for k, v in _dynamic_lstm(np.int8, 1, False, {}).items()}
    leaves = [inputs[name].requires_grad_() for name in ("X", "B", "initial_h", "initial_c")]
    model, tensors = _dynamic_lstm_model(inputs, {})
    weights = torch.randn(6, 1, 3, 4)
    (run(model, *tensors)[0] * weights).sum().backward()
    actual = [leaf.grad.clone() for leaf in leaves]

    W, R = ((inputs[n][0].float() * inputs[f"{n}_scale"]) for n in "WR")
    (h,), (c,), bias = inputs["initial_h"], inputs["initial_c"], inputs["B"][0].reshape(2, -1).sum(0)
    loss = torch.zeros(())
    for time, x in enumerate(_fake_quantized(inputs["X"])):
        i, o, f, g = (x @ W + _fake_quantized(h) @ R + bias).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        loss = loss + (h * weights[time, 0]).sum()
    for left, right in zip(actual, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("channels_last", [0, 1])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_convolution_of_either_layout(dtype: Any, per_channel: bool, channels_last: int) -> None:
    x, w = _quantized(dtype, 2, 4, 6, 5), _quantized(np.int8, 6, 2, 3, 3)
    scale = RANDOM.uniform(0.002, 0.01, 6).astype(np.float32) if per_channel else np.array(np.float32(0.004))
    inputs = {
        **_tensor("x", "x", np.ascontiguousarray(np.moveaxis(x, 1, -1)) if channels_last else x, dtype),
        "w": w,
        "w_scale": scale,
        "w_zero_point": np.zeros(scale.shape, np.int8),
        **_result("y", "y", dtype),
        "B": RANDOM.integers(-500, 500, 6).astype(np.int32),
    }
    attributes = {"channels_last": channels_last, "group": 2, "pads": [1, 0, 1, 2], "strides": [2, 1]}
    stored = {name: np.asarray(value) for name, value in inputs.items() if name != "x"}
    model = make_model("QLinearConv", inputs, attributes, 20, 1, stored, domain=MICROSOFT)
    expected, actual = run_onnxruntime(model, inputs["x"])[0], to_array(run(model, inputs["x"]))
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert np.abs(actual.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_quantized_embeddings_of_bert(dtype: Any, masked: bool, segments: bool) -> None:
    names = ("word_embedding", "position_embedding", "segment_embedding", "gamma", "beta")
    shapes = {"word_embedding": (9, 8), "position_embedding": (5, 8), "segment_embedding": (2, 8)}
    tables = {name: _quantized(dtype, *shapes.get(name, (8,))) for name in names}
    scales = {f"{name}_scale": np.array(RANDOM.uniform(0.01, 0.05), np.float32) for name in names}
    points = {f"{name}_zero_point": np.array(POINTS[dtype]["y"], dtype) for name in names}
    inputs: dict[str, Any] = {
        "input_ids": RANDOM.integers(0, 9, (2, 4)).astype(np.int32),
        "segment_ids": RANDOM.integers(0, 2, (2, 4)).astype(np.int32) if segments else None,
        **tables,
        "mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]], np.int32) if masked else None,
        **scales,
        **points,
    }
    if not segments:
        inputs |= dict.fromkeys(name for name in inputs if name.startswith("segment"))
    stored = {n: v for n, v in inputs.items() if v is not None and n not in ("input_ids", "segment_ids", "mask")}
    given = [value for name, value in inputs.items() if value is not None and name not in stored]
    model = make_model("QEmbedLayerNormalization", inputs, {"epsilon": 1e-5}, 20, 2, stored, domain=MICROSOFT)
    check_against_onnxruntime(model, *given, rtol=1e-4, atol=1e-5)

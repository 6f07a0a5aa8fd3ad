"""Quantization: values against onnxruntime and ml_dtypes, gradients against torch's fake quantization."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.errors import ModelError
from tests.one_node import check_against_onnxruntime, make_model, run, to_array

RANDOM = np.random.default_rng(0)
X = (RANDOM.standard_normal((3, 4, 6)) * 3).astype(np.float32)


def _scales(*shape: int) -> np.ndarray:
    return RANDOM.uniform(0.02, 0.1, shape).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "opset"),
    [
        *itertools.product((np.uint8, np.int8), (10, 13, 19, 21, 23)),
        *itertools.product((np.uint16, np.int16), (21, 23)),
    ],
)
def test_integers_per_tensor_and_per_axis(dtype: type, opset: int) -> None:
    """Quantizing and dequantizing as onnxruntime does; before opset 13 per tensor only, 16 bits from 21 on."""
    kinds: list[tuple[np.ndarray, dict[str, int]]] = [(np.array(0.03, np.float32), {})]
    if opset >= 13:
        kinds += [(_scales(4), {}), (_scales(6), {"axis": -1}), (_scales(3), {"axis": 0})]
    for scale, attributes in kinds:
        zero_point = RANDOM.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, scale.shape).astype(dtype)
        quantize = make_model("QuantizeLinear", {"x": X, "s": scale, "z": zero_point}, attributes, opset)
        check_against_onnxruntime(quantize, X, scale, zero_point)
        q = to_array(run(quantize, X, scale, zero_point))
        dequantize = make_model("DequantizeLinear", {"x": q, "s": scale, "z": zero_point}, attributes, opset)
        check_against_onnxruntime(dequantize, q, scale, zero_point, rtol=1e-6)
        without = make_model("DequantizeLinear", {"x": q, "s": scale}, attributes, opset)
        check_against_onnxruntime(without, q, scale, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_blocks_of_any_size_the_last_one_cut(axis: int) -> None:
    for block_size in (2, 3, 4):
        shape = list(X.shape)
        shape[axis] = -(-shape[axis] // block_size)
        scale, zero_point = _scales(*shape), RANDOM.integers(-9, 9, shape).astype(np.int8)
        attributes = {"axis": axis, "block_size": block_size}
        model = make_model("QuantizeLinear", {"x": X, "s": scale, "z": zero_point}, attributes, 21)
        check_against_onnxruntime(model, X, scale, zero_point)
        q = to_array(run(model, X, scale, zero_point))
        model = make_model("DequantizeLinear", {"x": q, "s": scale, "z": zero_point}, attributes, 21)
        check_against_onnxruntime(model, q, scale, zero_point, rtol=1e-6)


def test_halves_go_to_the_even_neighbour_and_large_numbers_saturate() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 3e38, -3e38, np.inf, -np.inf], np.float32)
    model = make_model("QuantizeLinear", {"x": x, "s": np.float32(1), "z": np.int8(0)}, {}, 21)
    assert run(model, x, np.float32(1), np.int8(0)).tolist() == [0, 2, 2, 0, -2, 127, -128, 127, -128]


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(ml_dtypes.int4, -8, 7), (ml_dtypes.uint4, 0, 15), (ml_dtypes.int2, -2, 1), (ml_dtypes.uint2, 0, 3)],
)
def test_integers_of_2_and_4_bits(dtype: Any, low: int, high: int) -> None:
    """The type is the zero point's, which torch holds in a byte; the graph says which type it is."""
    scale, zero_point = np.float32(0.5), np.array(1, dtype)
    expected = np.clip(np.rint(X / 0.5) + 1, low, high)
    model = make_model("QuantizeLinear", {"x": X, "s": scale, "z": None}, {}, 25, initializers={"z": zero_point})
    np.testing.assert_array_equal(run(model, X, scale), expected)
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = make_model("QuantizeLinear", {"x": X, "s": scale}, {"output_dtype": code}, 25)
    np.testing.assert_array_equal(run(model, X, scale), np.clip(np.rint(X / 0.5), low, high))


@pytest.mark.parametrize(
    "dtype",
    [
        ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz,
        ml_dtypes.float4_e2m1fn,
    ],
)  # fmt: skip
def test_small_floats(dtype: Any) -> None:
    scale, zero_point = np.float32(0.25), np.array(0, dtype)
    expected = (X / np.float32(0.25)).astype(dtype).astype(np.float32)
    model = make_model("QuantizeLinear", {"x": X, "s": scale, "z": None}, {}, 25, initializers={"z": zero_point})
    quantized = run(model, X, scale)
    np.testing.assert_array_equal(quantized.float(), expected)
    model = make_model("DequantizeLinear", {"x": to_array(quantized), "s": scale}, {}, 25)
    np.testing.assert_array_equal(run(model, quantized, scale), expected * np.float32(0.25))


def test_float8_without_saturation_overflows() -> None:
    x, scale = np.array([1e6, -1e6], np.float32), np.float32(1)
    code = TensorProto.FLOAT8E5M2
    for saturate, expected in ((1, [57344.0, -57344.0]), (0, [np.inf, -np.inf])):
        attributes = {"output_dtype": code, "saturate": saturate}
        assert (
            run(make_model("QuantizeLinear", {"x": x, "s": scale}, attributes, 21), x, scale).float().tolist()
            == expected
        )


def test_types_of_scale_and_output() -> None:
    """The scale's type is the division's, or `precision` is; `output_dtype` is the result's."""
    x, scale = np.float32(1.0), np.float16(0.1)
    ratio = np.rint(x / np.float32(scale))
    assert run(make_model("QuantizeLinear", {"x": x, "s": scale}, {"precision": 1}, 23), x, scale) == ratio
    q = np.array([3], np.int8)
    assert run(make_model("DequantizeLinear", {"x": q, "s": scale}, {}, 23), q, scale).dtype == torch.float16
    model = make_model("DequantizeLinear", {"x": q, "s": scale}, {"output_dtype": TensorProto.FLOAT}, 23)
    assert run(model, q, scale).dtype == torch.float32
    bits = np.array([127, 128], np.uint8).view(ml_dtypes.float8_e8m0fnu)  # 1 and 2
    values = np.array([[4.0, 4.0]], np.float32)
    model = make_model("QuantizeLinear", {"x": values, "s": None}, {"axis": 1}, 28, initializers={"s": bits})
    assert run(model, values).tolist() == [[4, 2]]
    large = np.array([2**24 + 3, -(2**31)], np.int32)
    model = make_model("DequantizeLinear", {"x": large, "s": np.float32(1)}, {}, 13)
    check_against_onnxruntime(model, large, np.float32(1))


def _graph(nodes: list[onnx.NodeProto], x: Any, initializers: dict[str, Any], outputs: list[str]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _pair(between: list[onnx.NodeProto] | None = None, last: str = "q") -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=1),
        *(between or []),
        helper.make_node("DequantizeLinear", [last, "s", "z"], ["y"], axis=1),
    ]


def test_straight_through_gradients_are_torchs_fake_quantization() -> None:
    """Per tensor and per axis, values inside and outside of the range."""
    x = torch.tensor(X, requires_grad=True)
    weight = torch.randn(X.shape)
    for scale, zero_point in ((np.float32(0.04), np.int8(11)), (_scales(4), np.array([0, 3, -100, 90], np.int8))):
        net = onward.to_torch(_graph(_pair(), X, {"s": scale, "z": zero_point}, ["y"]), weights_not_to_train=["s"])
        result = net(x)
        (gradient,) = torch.autograd.grad((result * weight).sum(), x)
        if scale.ndim:
            reference = torch.fake_quantize_per_channel_affine(
                x, torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), 1, -128, 127
            )
        else:
            reference = torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero_point), -128, 127)
        torch.testing.assert_close(result, reference)
        (expected,) = torch.autograd.grad((reference * weight).sum(), x)
        assert 0 < (expected == 0).sum() < expected.numel()
        torch.testing.assert_close(gradient, expected)


def test_scales_that_train_get_the_gradient_of_learned_step_sizes() -> None:
    x, weight = torch.tensor(X), torch.randn(X.shape)
    scale, zero_point = np.array([0.03], np.float32), np.array([5], np.int8)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    net = onward.to_torch(_graph(nodes, X, {"s": scale, "z": zero_point}, ["y"]), weights_to_train=["s"])
    (net(x) * weight).sum().backward()
    reference_scale = torch.tensor(scale, requires_grad=True)
    reference = torch._fake_quantize_learnable_per_tensor_affine(
        x, reference_scale, torch.tensor([5.0]), -128, 127, 1.0
    )
    (reference * weight).sum().backward()
    torch.testing.assert_close(net.weights["s"].grad, reference_scale.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn])
def test_straight_through_small_floats(dtype: Any) -> None:
    """The value is the rounded one; the gradient is 1 unless beyond the type's range."""
    largest = float(ml_dtypes.finfo(dtype).max)
    values = np.array([[0.3, 1.7, -2.2, 2 * largest, -3 * largest]], np.float32)
    x = torch.tensor(values, requires_grad=True)
    net = onward.to_torch(_graph(_pair(), values, {"s": np.float32(1), "z": np.array(0, dtype)}, ["y"]))
    result = net(x)
    clipped = np.clip(values, -largest, largest)
    np.testing.assert_array_equal(result.detach(), clipped.astype(dtype).astype(np.float32))
    result.sum().backward()
    if np.dtype(dtype).itemsize == 1 and largest > 10:
        assert x.grad.tolist() == [[1.0, 1.0, 1.0, 0.0, 0.0]]
    else:
        assert x.grad[0, :3].tolist() == [1.0, 1.0, 1.0]


def test_gradients_pass_through_operators_that_move_elements() -> None:
    """Exporters put Clip (narrow ranges) and reshapes between the pair."""
    between = [
        helper.make_node("Clip", ["q", "low", "high"], ["c"]),
        helper.make_node("Reshape", ["c", "shape"], ["r"]),
        helper.make_node("Transpose", ["r"], ["t"], perm=[1, 0, 2]),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        *between,
        helper.make_node("DequantizeLinear", ["t", "s", "z"], ["y"]),
    ]
    initializers = {
        "s": np.float32(0.05), "z": np.int8(0), "low": np.int8(-100), "high": np.int8(100),
        "shape": np.array([4, 3, 6]),
    }  # fmt: skip
    model = _graph(nodes, X, initializers, ["y"])
    x = torch.tensor(X, requires_grad=True)
    result = onward.to_torch(model)(x)
    expected = (
        (np.clip(np.rint(X / np.float32(0.05)), -100, 100) * np.float32(0.05)).reshape(4, 3, 6).transpose(1, 0, 2)
    )
    np.testing.assert_allclose(result.detach(), expected, rtol=1e-6)
    result.sum().backward()
    inside = (np.abs(np.rint(X / np.float32(0.05))) <= 100).astype(np.float32)
    np.testing.assert_allclose(x.grad, inside, rtol=1e-6)


def test_a_quantized_tensor_used_otherwise_stays_an_integer() -> None:
    """As an output of the model, or read by an operator that computes."""
    initializers = {"s": np.float32(0.05), "z": np.int8(3)}
    net = onward.to_torch(_graph(_pair(), X, initializers, ["y", "q"]))
    y, q = net(torch.tensor(X))
    assert q.dtype == torch.int8
    torch.testing.assert_close(y, (q.float() - 3) * 0.05)
    nodes = [*_pair(), helper.make_node("Cast", ["q"], ["c"], to=TensorProto.INT32)]
    assert onward.to_torch(_graph(nodes, X, initializers, ["c", "y"]))(torch.tensor(X))[0].dtype == torch.int32


def test_dynamic_quantization() -> None:
    for x in (X, np.abs(X), -np.abs(X), np.zeros((2, 2), np.float32)):
        check_against_onnxruntime(make_model("DynamicQuantizeLinear", {"x": x}, {}, 11, output_count=3), x)


def test_shapes_that_do_not_fit() -> None:
    scale = _scales(5)
    with pytest.raises(ModelError, match=r"scale is \[5\]; along axis 1 of \[3, 4, 6\] it must be \[4\]"):
        run(make_model("QuantizeLinear", {"x": X, "s": scale}, {}, 13), X, scale)
    with pytest.raises(ModelError, match="axis 3 is out of range for a tensor of rank 3"):
        run(make_model("QuantizeLinear", {"x": X, "s": scale}, {"axis": 3}, 13), X, scale)
    blocks = _scales(3, 1, 6)
    with pytest.raises(ModelError, match=r"scale \[3, 1, 6\] with blocks of 2 along axis 1 does not cover \[3, 4, 6\]"):
        run(make_model("QuantizeLinear", {"x": X, "s": blocks}, {"block_size": 2}, 21), X, blocks)


PRODUCTS = {
    "matrices": ("MatMulInteger (q, w, qz, wz)", (4, 5), "MatMul"),
    "images": ("ConvInteger (q, w, qz, wz)", (3, 4, 2, 2), "Conv"),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_gradients_pass_through_products_of_quantized_tensors(kind: str) -> None:
    """What `quantize_dynamic` writes: outputs are onnxruntime's, gradients those of the product of real numbers."""
    call, shape, real = PRODUCTS[kind]
    generator = np.random.default_rng(5)
    weight = generator.integers(0, 255, shape).astype(np.uint8)
    x = generator.normal(size=(2, 4) if kind == "matrices" else (2, 4, 5, 5)).astype(np.float32)
    gain = np.array(1.5, np.float32)
    axes = ", ".join(f"d{axis}" for axis in range(x.ndim))
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]> net (float[{axes}] x) => (y) {{
        scaled = Mul (x, gain)
        q, qs, qz = DynamicQuantizeLinear (scaled)
        sums = {call}
        real = Cast <to = 1> (sums)
        scale = Mul (qs, ws)
        y = Mul (real, scale) }}"""
    )
    tensors = {"gain": gain[None], "w": weight, "wz": np.array(120, np.uint8), "ws": np.array(0.01, np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    check_against_onnxruntime(model, x)
    net = onward.to_torch(model)
    given = torch.from_numpy(x).requires_grad_()
    y = net(given)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad(y, given, direction)
    plain = (torch.from_numpy(x) * 1.5).requires_grad_()
    real_weight = (torch.from_numpy(weight).float() - 120) * 0.01
    product = plain @ real_weight if real == "MatMul" else torch.nn.functional.conv2d(plain, real_weight)
    (expected,) = torch.autograd.grad(product, plain, direction)
    torch.testing.assert_close(gradient, expected * 1.5, rtol=1e-5, atol=1e-6)
    assert net.graph.frozen["ws"]


def test_no_gradient_reaches_what_only_integers_are_computed_from() -> None:
    """A product whose integers continue as integers passes no gradient, and nothing before it is taken for a weight."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> net (float[2, 4] x) => (float[2, 4] y)
        <float[4] b = {1, 2, 3, 4}, float s = {0.1}, uint8 z = {128},
        int8[4, 4] w = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}, float ws = {0.01}, int8 wz = {0}> {
        a = Add (x, b) q = QuantizeLinear (a, s, z) p = QLinearMatMul (q, s, z, w, ws, wz, s, z)
        y = DequantizeLinear (p, s, z) }""".replace(") ", ")\n")
    )
    net = onward.to_torch(model)
    assert not net.weights
    assert net.graph.frozen["b"] == "no gradient reaches it"

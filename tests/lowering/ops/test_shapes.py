"""Shapes, and tensors made from them: against onnxruntime, by hand, and with the types the standard says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto

from onward.errors import NodeError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run, to_array

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("opset", [7, 13, 21])
def test_shape_and_size(opset: int) -> None:
    for op_type in ("Shape", "Size"):
        check_against_onnxruntime(make_model(op_type, {"x": X}, opset=opset), X)


@pytest.mark.parametrize("bounds", [{"start": 1}, {"end": -1}, {"start": -9, "end": 9}, {"start": 2, "end": 1}])
def test_part_of_a_shape(bounds: dict[str, int]) -> None:
    check_against_onnxruntime(make_model("Shape", {"x": X}, bounds, 15), X)


@pytest.mark.parametrize("value", [None, np.array([3], np.int64), np.array([1.5], np.float16), np.array([True])])
@pytest.mark.parametrize("shape", [(2, 3), (70,), ()])
def test_constant_of_shape(value: np.ndarray | None, shape: tuple[int, ...]) -> None:
    """Small integer fills are shape arithmetic, large ones and floats are tensors; both look the same outside."""
    attributes = {} if value is None else {"value": value}
    sizes = np.array(shape, dtype=np.int64)
    expected = np.zeros(shape, np.float32) if value is None else np.full(shape, value[0])
    for model, given in (
        (make_model("ConstantOfShape", {"s": sizes}, attributes, 9), (sizes,)),
        (make_model("ConstantOfShape", {}, attributes, 20, initializers={"s": sizes}), ()),
    ):
        actual = to_array(run(model, *given))
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)


RANGES = [(1, 9, 3), (10, 4, -2), (3, 3, 1), (5, 1, 1), (0, 100, 1)]


@pytest.mark.parametrize("numbers", [*RANGES, (0.5, 2.1, 0.4), (2.0, -1.0, -0.75)])
@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.float32, np.float64])
@pytest.mark.parametrize("stored", [False, True])
def test_range(numbers: tuple[float, ...], dtype: type[np.generic], stored: bool) -> None:
    if any(n != int(n) for n in numbers) and not np.issubdtype(dtype, np.floating):
        pytest.skip("whole numbers only")
    values = dict(zip("abc", (np.array(n, dtype) for n in numbers), strict=True))
    model = make_model("Range", {} if stored else values, opset=11, initializers=values if stored else None)
    check_against_onnxruntime(model, *(() if stored else values.values()), rtol=1e-6)


def test_range_of_half_floats_counts_in_float32() -> None:
    """Adding 1 to 2048 in float16 gives 2048 again; counting does not stop there."""
    values = {"a": np.float16(2046), "b": np.float16(2052), "c": np.float16(1)}
    arrays = {name: np.array(value, np.float16) for name, value in values.items()}
    actual = run(make_model("Range", arrays, opset=27), *arrays.values())
    assert actual.dtype == torch.float16
    assert actual.tolist() == torch.arange(2046.0, 2052.0).half().tolist()


def test_range_needs_a_step() -> None:
    arrays = {name: np.array(value) for name, value in (("a", 0), ("b", 3), ("c", 0))}
    with pytest.raises(NodeError, match="delta of the range is 0"):
        run(make_model("Range", arrays, opset=11), *arrays.values())


@pytest.mark.parametrize(
    "attributes", [{}, {"k": 1}, {"k": -2, "dtype": TensorProto.DOUBLE}, {"dtype": TensorProto.BOOL}]
)
def test_eye_like(attributes: dict[str, Any]) -> None:
    x = np.zeros((3, 4), np.int32)
    actual = to_array(run(make_model("EyeLike", {"x": x}, attributes, 9), x))
    expected = np.eye(3, 4, attributes.get("k", 0))
    np.testing.assert_array_equal(actual, expected)
    types = {TensorProto.DOUBLE: np.float64, TensorProto.BOOL: np.bool_}
    assert actual.dtype == types.get(attributes.get("dtype", 0), np.int32)
    with pytest.raises(NodeError, match="rank 2, got rank 3"):
        run(make_model("EyeLike", {"x": X}, opset=9), X)


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [None, 0, 2, -1, 9])
def test_trilu(upper: int, k: int | None) -> None:
    stored = {} if k is None else {"k": np.array(k)}
    check_against_onnxruntime(make_model("Trilu", {"x": X}, {"upper": upper}, 14, initializers=stored), X)
    x = X.astype(np.float64)
    check_gradients(make_model("Trilu", {"x": x}, {"upper": upper}, 14, initializers=stored), x)
    for dtype in (np.uint16, np.bool_):
        data = x.astype(dtype)
        actual = run(make_model("Trilu", {"x": data}, {"upper": upper}, 14, initializers=stored), data)
        np.testing.assert_array_equal(to_array(actual), (np.triu if upper else np.tril)(x, k or 0).astype(dtype))


def test_constant_fill_takes_a_given_shape_only() -> None:
    """Of ONNX 1.4; exports of an LSTM at opset 7 hold it (tests/lowering/test_found_models.py)."""
    sizes = np.array([2, 3])
    attributes = {"input_as_shape": 1, "extra_shape": [1], "value": 2.5, "dtype": TensorProto.FLOAT}
    filled = run(make_model("ConstantFill", {"input": sizes}, attributes, 7), sizes)
    assert torch.equal(filled, torch.full((2, 3, 1), 2.5))
    with pytest.raises(NodeError, match="ConstantFill in the shape of another tensor is not known"):
        run(make_model("ConstantFill", {"input": sizes}, {}, 7), sizes)

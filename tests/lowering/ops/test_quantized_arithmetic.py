"""Matrix products and convolutions of integers against onnxruntime."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.one_node import check_against_onnxruntime, make_model, run, to_array

RANDOM = np.random.default_rng(0)


def _bytes(dtype: type, *shape: int) -> np.ndarray:
    return RANDOM.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, endpoint=True).astype(dtype)


@pytest.mark.parametrize(("a_type", "b_type"), [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8)])
def test_mat_mul_integer(a_type: type, b_type: type) -> None:
    a, b = _bytes(a_type, 2, 3, 4), _bytes(b_type, 4, 5)
    check_against_onnxruntime(make_model("MatMulInteger", {"A": a, "B": b}, {}, 10), a, b)
    za, zb = _bytes(a_type), _bytes(b_type)
    check_against_onnxruntime(make_model("MatMulInteger", {"A": a, "B": b, "za": za, "zb": zb}, {}, 10), a, b, za, zb)
    columns = _bytes(b_type, 5)
    model = make_model("MatMulInteger", {"A": a, "B": b, "za": za, "zb": columns}, {}, 10)
    check_against_onnxruntime(model, a, b, za, columns)


def test_zero_points_per_row() -> None:
    """Not in onnxruntime: by hand."""
    a, b, rows = _bytes(np.uint8, 3, 4), _bytes(np.uint8, 4, 5), _bytes(np.uint8, 3)
    result = run(make_model("MatMulInteger", {"A": a, "B": b, "z": rows}, {}, 10), a, b, rows)
    expected = (a.astype(np.int64) - rows[:, None].astype(np.int64)) @ b.astype(np.int64)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_q_linear_mat_mul(dtype: type) -> None:
    """Per tensor against onnxruntime; per row and column by hand."""
    a, b = _bytes(dtype, 3, 4), _bytes(dtype, 4, 5)
    za, zb, zy = (_bytes(dtype) for _ in range(3))
    scales = np.float32(0.03), np.float32(0.02), np.float32(0.9)
    given = [a, scales[0], za, b, scales[1], zb, scales[2], zy]
    model = make_model("QLinearMatMul", {f"input_{i}": v for i, v in enumerate(given)}, {}, 10)
    check_against_onnxruntime(model, *given)
    rows, columns = RANDOM.uniform(0.01, 0.05, 3).astype(np.float32), RANDOM.uniform(0.01, 0.05, 5).astype(np.float32)
    za, zb = _bytes(dtype, 3), _bytes(dtype, 5)
    given = [a, rows, za, b, columns, zb, scales[2], zy]
    model = make_model("QLinearMatMul", {f"input_{i}": v for i, v in enumerate(given)}, {}, 21)
    product = (a.astype(float) - za[:, None]) @ (b.astype(float) - zb) * rows[:, None] * columns / scales[2]
    info = np.iinfo(dtype)
    expected = np.clip(np.rint(product) + int(zy), info.min, info.max)
    np.testing.assert_array_equal(to_array(run(model, *given)), expected)


def test_conv_integer() -> None:
    """Padding is with the zero point: a padded place counts nothing."""
    x, w = _bytes(np.uint8, 2, 4, 7, 6), _bytes(np.uint8, 6, 2, 3, 3)
    zx, zw = np.uint8(100), np.uint8(30)
    for attributes in (
        {"group": 2},
        {"group": 2, "pads": [1, 2, 0, 1], "strides": [2, 1]},
        {"group": 2, "auto_pad": "SAME_UPPER"},
    ):
        model = make_model("ConvInteger", {"x": x, "w": w, "zx": zx, "zw": zw}, attributes, 10)
        check_against_onnxruntime(model, x, w, zx, zw)
    channels = _bytes(np.uint8, 6)
    model = make_model("ConvInteger", {"x": x, "w": w, "zx": zx, "zw": channels}, {"group": 2}, 10)
    result = run(model, x, w, zx, channels)
    one = run(
        make_model("ConvInteger", {"x": x, "w": w, "zx": zx, "zw": channels[1]}, {"group": 2}, 10),
        x,
        w,
        zx,
        channels[1],
    )
    np.testing.assert_array_equal(result[:, 1], one[:, 1])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_q_linear_conv(dtype: type) -> None:
    x, w, bias = _bytes(dtype, 1, 2, 6, 5), _bytes(dtype, 3, 2, 3, 3), RANDOM.integers(-500, 500, 3).astype(np.int32)
    scale = RANDOM.uniform(0.01, 0.05, 3).astype(np.float32)
    # onnxruntime wants one zero point for all channels of an unsigned weight, and 0 for a signed one.
    zero = np.full(3, 0 if dtype is np.int8 else 90, dtype)
    for (w_scale, w_zero), biased in itertools.product(((np.float32(0.02), zero[0]), (scale, zero)), (False, True)):
        given = [x, np.float32(0.04), _bytes(dtype), w, w_scale, w_zero, np.float32(2.0), _bytes(dtype)]
        given += [bias] if biased else []
        model = make_model("QLinearConv", {f"input_{i}": v for i, v in enumerate(given)}, {"pads": [1, 1, 1, 1]}, 10)
        check_against_onnxruntime(model, *given)

"""Pooling equals onnxruntime's over attributes and ranks; gradients by finite differences in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import onward
from onward.errors import NodeError
from onward.lowering.ops.pooling import average_pool
from tests.one_node import (
    check_against_onnxruntime,
    check_gradients,
    make_model,
    normal,
    run,
    run_onnxruntime,
    to_array,
)

RANDOM = np.random.default_rng(0)
_draw = normal(RANDOM)


WINDOWS = [
    ((2, 3, 10), {"kernel_shape": [3]}),
    ((2, 3, 10), {"kernel_shape": [3], "strides": [2], "pads": [0, 2]}),
    ((2, 2, 9, 8), {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0]}),
    ((2, 2, 9, 8), {"kernel_shape": [3, 3], "strides": [2, 3], "pads": [0, 2, 1, 1]}),
    ((2, 2, 9, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((2, 2, 9, 8), {"kernel_shape": [4, 2], "strides": [2, 1], "auto_pad": "SAME_LOWER"}),
    ((2, 2, 9, 8), {"kernel_shape": [4, 2], "strides": [2, 3], "auto_pad": "VALID"}),
    ((1, 2, 5, 6, 7), {"kernel_shape": [2, 3, 2], "strides": [2, 1, 2], "pads": [1, 0, 1, 0, 1, 0]}),
]
CEILED = [
    ((2, 3, 10), {"kernel_shape": [3], "strides": [2], "ceil_mode": 1}),
    ((2, 2, 9, 8), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ((2, 2, 9, 8), {"kernel_shape": [2, 3], "strides": [4, 3], "pads": [0, 1, 1, 0], "ceil_mode": 1}),
    ((1, 1, 6, 6), {"kernel_shape": [1, 1], "strides": [2, 5], "ceil_mode": 1}),
]
DILATED = [
    ((2, 3, 10), {"kernel_shape": [3], "dilations": [2], "pads": [1, 1]}),
    ((2, 2, 9, 8), {"kernel_shape": [3, 2], "dilations": [2, 3], "strides": [2, 1], "pads": [1, 0, 0, 1]}),
    ((2, 2, 9, 8), {"kernel_shape": [2, 2], "dilations": [3, 1], "strides": [2, 3], "ceil_mode": 1}),
    ((1, 2, 5, 6, 7), {"kernel_shape": [2, 2, 3], "dilations": [2, 1, 2]}),
]


@pytest.mark.parametrize("opset", [12, 22])
@pytest.mark.parametrize(("shape", "attributes"), WINDOWS + CEILED + DILATED)
def test_max_pool_equals_onnxruntime(shape: tuple[int, ...], attributes: dict[str, Any], opset: int) -> None:
    X = _draw(*shape)
    check_against_onnxruntime(make_model("MaxPool", {"X": X}, attributes, opset, output_count=2), X)
    check_against_onnxruntime(make_model("MaxPool", {"X": X}, attributes, opset), X)


@pytest.mark.parametrize(("shape", "attributes"), WINDOWS)
def test_old_max_pool_equals_onnxruntime(shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    X = _draw(*shape)
    check_against_onnxruntime(make_model("MaxPool", {"X": X}, attributes, 7), X)
    check_against_onnxruntime(make_model("MaxPool", {"X": X}, attributes, 8, output_count=2), X)


@pytest.mark.parametrize("index", [1, 3, 7])
def test_max_pool_counts_indices_by_columns(index: int) -> None:
    shape, attributes = WINDOWS[index]
    X = _draw(*shape)
    model = make_model("MaxPool", {"X": X}, {**attributes, "storage_order": 1}, 12, output_count=2)
    check_against_onnxruntime(model, X)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.float64, np.float16])
def test_max_pool_keeps_the_type(dtype: Any) -> None:
    X = RANDOM.integers(0, 100, (1, 2, 6, 6)).astype(dtype)
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]}
    actual = to_array(run(make_model("MaxPool", {"X": X}, attributes, 22), X))
    expected = run_onnxruntime(make_model("MaxPool", {"X": X.astype(np.float32)}, attributes, 22), X.astype(np.float32))
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, expected[0].astype(dtype))


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("opset", [7, 11, 22])
@pytest.mark.parametrize(("shape", "attributes"), WINDOWS)
def test_average_pool_equals_onnxruntime(
    shape: tuple[int, ...], attributes: dict[str, Any], opset: int, include: int
) -> None:
    X = _draw(*shape)
    model = make_model("AveragePool", {"X": X}, {**attributes, "count_include_pad": include}, opset)
    check_against_onnxruntime(model, X)


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize(("shape", "attributes"), CEILED + DILATED)
def test_new_average_pool_equals_onnxruntime(shape: tuple[int, ...], attributes: dict[str, Any], include: int) -> None:
    X = _draw(*shape)
    model = make_model("AveragePool", {"X": X}, {**attributes, "count_include_pad": include}, 19)
    check_against_onnxruntime(model, X)


@pytest.mark.parametrize("include", [0, 1])
def test_an_average_over_more_than_the_image_is_its_mean(include: int) -> None:
    """As EfficientNet exports its last one, of 2560 x 2560 pixels, over all of which compiled code would loop."""
    X = _draw(2, 3, 5, 4)
    attributes = {"kernel_shape": [2560, 2560], "strides": [2560, 2560], "ceil_mode": 1, "count_include_pad": include}
    found = run(make_model("AveragePool", {"X": X}, attributes, 19), X)
    np.testing.assert_allclose(to_array(found), X.mean((2, 3), keepdims=True), rtol=1e-6, atol=1e-7)
    assert type(average_pool(torch.ones(1, 1, 5, 4).requires_grad_(), **attributes).grad_fn).__name__ == "MeanBackward1"


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(("shape", "attributes"), WINDOWS)
def test_lp_pool_equals_onnxruntime(shape: tuple[int, ...], attributes: dict[str, Any], p: int) -> None:
    X = _draw(*shape)
    for opset in (7, 11, 18):
        check_against_onnxruntime(make_model("LpPool", {"X": X}, {**attributes, "p": p}, opset), X)


@pytest.mark.parametrize("op_type", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 5, 4), (2, 3, 3, 2, 4)])
def test_global_pools_equal_onnxruntime_and_have_gradients(op_type: str, shape: tuple[int, ...]) -> None:
    X = _draw(*shape)
    check_against_onnxruntime(make_model(op_type, {"X": X}, {}, 20), X)
    check_gradients(make_model(op_type, {"X": X.astype(float)}, {}, 22), X.astype(float))


@pytest.mark.parametrize(
    ("op_type", "case", "extra"),
    [
        ("MaxPool", WINDOWS[3], {}),
        ("MaxPool", DILATED[1], {}),
        ("MaxPool", CEILED[1], {}),
        ("AveragePool", WINDOWS[2], {"count_include_pad": 1}),
        ("AveragePool", WINDOWS[3], {"count_include_pad": 0}),
        ("AveragePool", DILATED[1], {"count_include_pad": 1}),
        ("AveragePool", CEILED[2], {"count_include_pad": 0}),
        ("LpPool", WINDOWS[3], {"p": 2}),
        ("LpPool", WINDOWS[1], {"p": 3}),
    ],
)
def test_pooling_gradients(op_type: str, case: tuple[Any, Any], extra: dict[str, Any]) -> None:
    X = _draw(*case[0], dtype=float)
    check_gradients(make_model(op_type, {"X": X}, {**case[1], **extra}, 22), X)


def test_the_norm_of_zeros_has_gradient_zero() -> None:
    model = make_model("LpPool", {"X": np.zeros((1, 1, 4))}, {"kernel_shape": [2], "strides": [2]}, 22)
    X = torch.zeros((1, 1, 4), dtype=torch.float64, requires_grad=True)
    run(model, X).sum().backward()
    assert X.grad is not None
    assert not X.grad.any()


@pytest.mark.parametrize("shape", [None, [1, 2, 7, 9]])
def test_max_unpool_puts_values_back(shape: list[int] | None) -> None:
    X = RANDOM.permutation(2 * 6 * 8).reshape(1, 2, 6, 8).astype(np.float32)
    attributes = {"kernel_shape": [2, 2], "strides": [2, 2]}
    pooled, indices = run(make_model("MaxPool", {"X": X}, attributes, 12, output_count=2), X)
    inputs = {"X": pooled, "I": indices} | ({} if shape is None else {"output_shape": np.array(shape)})
    model = make_model("MaxUnpool", inputs, attributes, 11)
    back = run(model, *inputs.values())
    kept = torch.zeros(96).index_put((indices.flatten(),), pooled.flatten()).reshape(1, 2, 6, 8)
    torch.testing.assert_close(back[:, :, :6, :8], kept)
    assert list(back.shape) == (shape or [1, 2, 6, 8])
    doubled = [pooled.double(), *list(inputs.values())[1:]]
    check_gradients(make_model("MaxUnpool", dict(zip(inputs, doubled, strict=True)), attributes, 11), *doubled)


def test_max_roi_pool_equals_onnxruntime_and_has_gradients() -> None:
    X = _draw(2, 3, 8, 9)
    rois = np.array([[0, 1, 1, 5, 6], [1, 0, 2, 8, 7], [1, 3, 3, 3, 3], [0, 6, 5, 12, 10]], np.float32)
    for scale in (1.0, 0.5):
        attributes = {"pooled_shape": [2, 3], "spatial_scale": scale}
        check_against_onnxruntime(make_model("MaxRoiPool", {"X": X, "rois": rois}, attributes, 20), X, rois)
    model = make_model("MaxRoiPool", {"X": X.astype(float), "rois": rois}, {"pooled_shape": [2, 3]}, 22)
    check_gradients(model, X.astype(float), rois)


def test_max_pool_counts_only_real_elements_of_an_empty_window() -> None:
    """A window that a wide padding leaves empty is -inf, not the padding's zero."""
    X = np.ones((1, 1, 3), np.float32)
    result = run(make_model("MaxPool", {"X": X}, {"kernel_shape": [2], "pads": [2, 0]}, 12), X)
    assert result[0, 0].tolist() == [-np.inf, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((1, 34), {"kernel_shape": [2, 4], "pads": [1, 2, 1, 2], "dilations": [2, 1], "ceil_mode": 1}),
        ((1, 40), {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1], "dilations": [2, 2]}),
        ((2,), {"kernel_shape": [2], "pads": [1, 1], "dilations": [3], "strides": [2]}),
        ((2, 3, 1), {"kernel_shape": [2, 2, 2], "pads": [0, 1, 1, 0, 1, 1], "dilations": [1, 2, 2]}),
    ],
)
def test_windows_that_step_over_the_image(shape: tuple[int, ...], attributes: dict[str, Any]) -> None:
    """Values against numpy, gradients against finite differences; torch's own kernel broke the process's memory."""
    X = _draw(1, 2, *shape, dtype=float)
    windows = _windows(X, attributes)
    is_empty = np.isnan(windows).all(-1)
    assert is_empty.any()
    expected = np.nanmax(np.where(np.isnan(windows), -np.inf, windows), -1)
    model = make_model("MaxPool", {"X": X}, attributes, 22)
    np.testing.assert_array_equal(to_array(run(model, X)), expected)
    x = torch.from_numpy(X).requires_grad_()
    y = onward.to_torch(model)(x)
    met = torch.from_numpy(~is_empty)
    assert torch.autograd.gradcheck(lambda x: onward.to_torch(model)(x)[met], x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.sum() == met.sum()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"kernel_shape": [3]}, r"kernel_shape is \[3\]; the input has 2 spatial axes"),
        ({"kernel_shape": [3, 3], "strides": [0, 1]}, "every entry must be at least 1"),
        ({"kernel_shape": [9, 3]}, "a kernel of 9 .* is larger than an axis of 5"),
        ({"kernel_shape": [9, 3], "ceil_mode": 1, "strides": [2, 2]}, "finds no place on an axis of 5"),
    ],
)
def test_bad_values_are_named(attributes: dict[str, Any], message: str) -> None:
    X = _draw(1, 2, 5, 5)
    with pytest.raises(NodeError, match=message):
        run(make_model("MaxPool", {"X": X}, attributes, 22), X)


FOUR_AXES = [
    {"kernel_shape": [2, 2, 3, 2], "strides": [2, 1, 2, 1], "pads": [1, 0, 1, 1, 0, 1, 1, 0]},
    {"kernel_shape": [2, 3, 2, 2], "strides": [2, 2, 3, 2], "ceil_mode": 1},
    {"kernel_shape": [2, 2, 2, 2], "dilations": [2, 1, 2, 3], "pads": [0, 1, 0, 0, 0, 1, 0, 0]},
]


def _windows(X: np.ndarray[Any, Any], attributes: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Every window's elements on a last axis, NaN where a window meets none: (N, C, sizes of Y, elements)."""
    n = X.ndim - 2
    ones, zeros = [1] * n, [0] * 2 * n
    kernel, strides, dilations, pads = (
        attributes.get(name, default)
        for name, default in (("kernel_shape", ones), ("strides", ones), ("dilations", ones), ("pads", zeros))
    )
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    whole = np.pad(
        X, [(0, 0)] * 2 + [(b, e + 9) for b, e in zip(pads[:n], pads[n:], strict=True)], constant_values=np.nan
    )
    windows = np.lib.stride_tricks.sliding_window_view(whole, spans, tuple(range(2, n + 2)))
    for axis, (span, stride, d) in enumerate(zip(spans, strides, dilations, strict=True)):
        free = X.shape[axis + 2] + pads[axis] + pads[axis + n] - span
        count = (-(-free // stride) if attributes.get("ceil_mode") else free // stride) + 1
        if attributes.get("ceil_mode") and (count - 1) * stride >= X.shape[axis + 2] + pads[axis]:
            count -= 1
        windows = windows.take(np.arange(count) * stride, axis + 2).take(np.arange(0, span, d), axis + 2 + n)
    return windows.reshape(*windows.shape[: n + 2], -1)


@pytest.mark.parametrize("attributes", FOUR_AXES)
def test_pools_over_four_spatial_axes_reduce_every_window(attributes: dict[str, Any]) -> None:
    """onnxruntime pools at most three; numpy lays the windows, and finite differences check the gradients."""
    X = _draw(2, 2, 4, 3, 5, 4, dtype=float)
    windows, places = _windows(X, attributes), _windows(np.arange(X.size, dtype=float).reshape(X.shape), attributes)
    expected = {"MaxPool": np.nanmax(windows, -1), "AveragePool": np.nanmean(windows, -1)}
    expected["LpPool"] = np.sqrt(np.nansum(windows**2, -1))
    for op_type, values in expected.items():
        model = make_model(op_type, {"X": X}, attributes, 22)
        np.testing.assert_allclose(to_array(run(model, X)), values, rtol=1e-12)
        check_gradients(model, X[:1, :1])
    Y, indices = run(make_model("MaxPool", {"X": X}, attributes, 22, output_count=2), X)
    largest = np.nanargmax(windows, -1)[..., None]
    np.testing.assert_array_equal(to_array(Y), np.take_along_axis(windows, largest, -1)[..., 0])
    np.testing.assert_array_equal(to_array(indices), np.take_along_axis(places, largest, -1)[..., 0])


@pytest.mark.parametrize("include", [0, 1])
def test_average_pool_over_four_spatial_axes_counts_padding_as_the_standard_does(include: int) -> None:
    X = _draw(2, 2, 4, 3, 5, 4)
    for attributes in FOUR_AXES:
        model = make_model("AveragePool", {"X": X}, {**attributes, "count_include_pad": include}, 22)
        expected = ReferenceEvaluator(model).run(None, {"X": X})[0]
        np.testing.assert_allclose(to_array(run(model, X)), expected, rtol=1e-5, atol=1e-6)


def test_pools_over_five_axes_and_whole_images_of_four() -> None:
    X = _draw(1, 2, 3, 2, 3, 2, 3, dtype=float)
    windows = np.lib.stride_tricks.sliding_window_view(X, [2] * 5, (2, 3, 4, 5, 6))
    model = make_model("MaxPool", {"X": X}, {"kernel_shape": [2] * 5}, 22)
    np.testing.assert_array_equal(to_array(run(model, X)), windows.max((-5, -4, -3, -2, -1)))
    X = X[..., 0]
    for op_type, values in (("Max", X.max((2, 3, 4, 5))), ("Average", X.mean((2, 3, 4, 5)))):
        model = make_model(f"Global{op_type}Pool", {"X": X}, {}, 22)
        np.testing.assert_allclose(to_array(run(model, X)), values.reshape(1, 2, 1, 1, 1, 1), rtol=1e-12)
        check_gradients(model, X)
    model = make_model("GlobalLpPool", {"X": X}, {"p": 3}, 22)
    expected = np.cbrt((np.abs(X) ** 3).sum((2, 3, 4, 5), keepdims=True))
    np.testing.assert_allclose(to_array(run(model, X)), expected, rtol=1e-12)
    check_gradients(model, X)


def test_an_output_smaller_than_what_is_unpooled_is_refused() -> None:
    pooled = _draw(1, 2, 3, 4)
    inputs = {"X": pooled, "I": np.zeros(pooled.shape, np.int64), "output_shape": np.array([1, 2, 6, 7])}
    model = make_model("MaxUnpool", inputs, {"kernel_shape": [2, 2], "strides": [2, 2]}, 11)
    with pytest.raises(NodeError, match=r"output_shape is \[1, 2, 6, 7\], smaller than the unpooled \[1, 2, 6, 8\]"):
        run(model, *inputs.values())

"""Resize and Upsample equal onnxruntime's in every mode; gradients by finite differences in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from torch.utils.flop_counter import FlopCounterMode

from onward.errors import NodeError
from onward.lowering.ops.resize import resize
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run, to_array

RANDOM = np.random.default_rng(0)
X4 = RANDOM.standard_normal((1, 2, 5, 7)).astype(np.float32)

COORDINATES = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
TARGETS: list[tuple[str, list[float]]] = [
    ("scales", [1, 1, 2, 3]),
    ("scales", [1, 1, 0.6, 1.5]),
    ("scales", [1, 1, 1.7, 0.55]),
    ("sizes", [1, 2, 10, 28]),
    ("sizes", [1, 2, 3, 9]),
    ("sizes", [1, 2, 1, 4]),
]


def _targets(coordinates: str) -> list[tuple[str, list[float]]]:
    """onnxruntime's align_corners differs from the standard's where a scale implies a fractional length."""
    whole = [t for t in TARGETS if t[0] == "sizes" or all(float(s).is_integer() for s in t[1])]
    return whole if coordinates == "align_corners" else TARGETS


def _inputs(kind: str, values: list[float], roi: list[float] | None = None) -> dict[str, Any]:
    """The stored inputs after X; absent ones left out."""
    dtype = np.float32 if kind == "scales" else np.int64
    stored: dict[str, Any] = {"roi": np.array(roi, np.float32)} if roi else {}
    return stored | {kind: np.array(values, dtype)}


def _model(
    x: Any, kind: str, values: list[float], attributes: dict[str, Any], opset: int, roi: list[float] | None = None
) -> Any:
    stored = _inputs(kind, values, roi)
    return make_model("Resize", {"X": x, "roi": None, "scales": None, "sizes": None}, attributes, opset, 1, stored)


@pytest.mark.parametrize("opset", [11, 13, 18, 19])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_resize_equals_onnxruntime(coordinates: str, mode: str, opset: int) -> None:
    for kind, values in _targets(coordinates):
        if opset == 11 and kind == "sizes":
            continue
        attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
        if opset == 11:
            stored = {"roi": np.zeros(0, np.float32), "scales": np.array(values, np.float32)}
            model = make_model("Resize", {"X": X4, "roi": None, "scales": None}, attributes, opset, 1, stored)
        else:
            model = _model(X4, kind, values, attributes, opset)
        check_against_onnxruntime(model, X4, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("coordinates", COORDINATES)
def test_every_nearest_mode_equals_onnxruntime(coordinates: str, nearest: str) -> None:
    for kind, values in _targets(coordinates):
        attributes = {"coordinate_transformation_mode": coordinates, "nearest_mode": nearest}
        check_against_onnxruntime(_model(X4, kind, values, attributes, 13), X4)


@pytest.mark.parametrize(
    ("mode", "scales"),
    [
        *itertools.product(["nearest", "linear"], [[1, 1, 2, 3], [1, 1, 0.6, 0.5], [1, 1, 1.5, 0.7]]),
        ("nearest", [2, 1, 3, 1]),
    ],
)
def test_resize_10_and_upsample_equal_onnxruntime(mode: str, scales: list[float]) -> None:
    stored = {"scales": np.array(scales, np.float32)}
    check_against_onnxruntime(make_model("Resize", {"X": X4, "scales": None}, {"mode": mode}, 10, 1, stored), X4)
    if min(scales) >= 1:
        check_against_onnxruntime(make_model("Upsample", {"X": X4, "scales": None}, {"mode": mode}, 9, 1, stored), X4)
        model = make_model("Upsample", {"X": X4}, {"mode": mode, "scales": [float(s) for s in scales]}, 7)
        check_against_onnxruntime(model, X4)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners", "asymmetric"])
def test_antialias_equals_the_reference(coordinates: str, mode: str) -> None:
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates, "antialias": 1}
    for kind, values in (("scales", [1, 1, 0.6, 0.5]), ("sizes", [1, 2, 3, 9]), ("sizes", [1, 2, 2, 2])):
        model = _model(X4, kind, values, attributes, 19)
        expected = ReferenceEvaluator(model).run(None, {"X": X4})[0]
        np.testing.assert_allclose(to_array(run(model, X4)), expected, rtol=1e-4, atol=1e-5)


def test_exclude_outside_and_the_coefficient_equal_onnxruntime() -> None:
    attributes = {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5}
    for kind, values in TARGETS:
        check_against_onnxruntime(_model(X4, kind, values, attributes, 13), X4, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_crop_and_resize_equals_the_text(mode: str) -> None:
    """`x = start * (size - 1) + y * (end - start) * (size - 1) / (target - 1)`, a constant outside of the input."""
    roi = [0, 0, 0.2, -0.3, 1, 1, 0.9, 1.3]
    attributes = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 9.0}
    model = _model(X4, "sizes", [1, 2, 4, 6], attributes, 13, roi)
    expected = ReferenceEvaluator(model).run(None, {"X": X4})[0]
    np.testing.assert_allclose(to_array(run(model, X4)), expected, rtol=1e-4, atol=1e-5)
    check_against_onnxruntime(model, X4, rtol=1e-4, atol=1e-4)


def test_crop_by_scales_has_the_size_that_shape_inference_says() -> None:
    attributes = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
    model = _model(X4, "scales", [1, 1, 2, 3], attributes, 13, [0, 0, 0.1, 0.2, 1, 1, 0.8, 0.9])
    check_against_onnxruntime(model, X4, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nearest", ["floor", "round_prefer_floor"])
@pytest.mark.parametrize("scales", [[1, 1, 2, 3], [1, 1, 0.6, 1.7]])
def test_half_pixel_for_nearest_of_version_11_equals_onnxruntime(nearest: str, scales: list[float]) -> None:
    attributes = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": nearest}
    stored = {"roi": np.zeros(0, np.float32), "scales": np.array(scales, np.float32)}
    model = make_model("Resize", {"X": X4, "roi": None, "scales": None}, attributes, 11, 1, stored)
    check_against_onnxruntime(model, X4)


@pytest.mark.parametrize("policy", ["stretch", "not_larger", "not_smaller"])
def test_axes_and_policy_equal_onnxruntime(policy: str) -> None:
    attributes = {"mode": "linear", "axes": [3, 2], "keep_aspect_ratio_policy": policy}
    check_against_onnxruntime(_model(X4, "sizes", [9, 8], attributes, 18), X4, rtol=1e-4, atol=1e-5)
    attributes = {"mode": "nearest", "axes": [2, 3], "keep_aspect_ratio_policy": policy}
    check_against_onnxruntime(_model(X4, "sizes", [9, 8], attributes, 18), X4, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 2, 6), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_other_ranks_equal_the_reference(shape: tuple[int, ...], mode: str) -> None:
    x = RANDOM.standard_normal(shape).astype(np.float32)
    for coordinates in COORDINATES:
        attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
        model = _model(x, "sizes", [1, 2, *(2 * s + 1 for s in shape[2:])], attributes, 19)
        expected = ReferenceEvaluator(model).run(None, {"X": x})[0]
        np.testing.assert_allclose(to_array(run(model, x)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint16, np.float16, np.bool_])
def test_nearest_moves_any_type(dtype: Any) -> None:
    x = RANDOM.integers(0, 2, (1, 1, 3, 4)).astype(dtype)
    result = run(_model(x, "scales", [1, 1, 2, 3], {}, 19), x)
    np.testing.assert_array_equal(to_array(result), x.repeat(2, axis=2).repeat(3, axis=3))


def test_linear_rounds_integers() -> None:
    x = np.array([[[[0, 10], [255, 3]]]], np.uint8)
    model = _model(x, "sizes", [1, 1, 3, 5], {"mode": "linear"}, 19)
    np.testing.assert_array_equal(to_array(run(model, x)), ReferenceEvaluator(model).run(None, {"X": x})[0])


def test_half_pixel_symmetric_centers_the_region() -> None:
    attributes = {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"}
    model = _model(X4, "scales", [1, 1, 0.7, 1.3], attributes, 19)
    expected = ReferenceEvaluator(model).run(None, {"X": X4})[0]
    np.testing.assert_allclose(to_array(run(model, X4)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "attributes",
    [
        {"mode": "nearest"},
        {"mode": "linear"},
        {"mode": "linear", "coordinate_transformation_mode": "asymmetric"},
        {"mode": "linear", "antialias": 1},
        {"mode": "cubic"},
        {"mode": "cubic", "exclude_outside": 1},
        {"mode": "cubic", "coordinate_transformation_mode": "align_corners", "cubic_coeff_a": -0.5},
    ],
)
def test_gradients(attributes: dict[str, Any]) -> None:
    x = X4.astype(float)
    for kind, values in (TARGETS[0], TARGETS[2], TARGETS[4]):
        check_gradients(_model(x, kind, values, attributes, 19), x)


def test_scales_round_like_float32() -> None:
    """3 * float32(5 / 3) is below 5 in exact arithmetic; the result has 5 elements all the same."""
    x = np.arange(3, dtype=np.float32).reshape(1, 1, 3)
    assert run(_model(x, "scales", [1, 1, 5 / 3], {}, 19), x).shape == (1, 1, 5)


def test_low_precision_is_interpolated_in_float32() -> None:
    x = torch.randn(1, 1, 6, 6, dtype=torch.bfloat16)
    model = _model(x, "sizes", [1, 1, 9, 4], {"mode": "cubic", "exclude_outside": 1}, 19)
    wide = _model(x.float(), "sizes", [1, 1, 9, 4], {"mode": "cubic", "exclude_outside": 1}, 19)
    torch.testing.assert_close(run(model, x), run(wide, x.float()).to(torch.bfloat16), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "values", "attributes", "message"),
    [
        ("scales", [1, 2], {}, "scales has 2 entries for 4 axes"),
        ("scales", [1, 1, 0, 1], {}, "every entry must be positive"),
        ("sizes", [1, 2, 3, 4], {"mode": "quadratic"}, "mode is 'quadratic'; expected one of nearest, linear, cubic"),
        ("sizes", [1, 2, 3, 4], {"nearest_mode": "up"}, "nearest_mode is 'up'"),
    ],
)
def test_bad_values_are_named(kind: str, values: list[float], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(NodeError, match=message):
        run(_model(X4, kind, values, attributes, 19), X4)


@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners", "pytorch_half_pixel"])
@pytest.mark.parametrize(
    ("mode", "torch_mode", "shape", "target"),
    [
        ("cubic", "bicubic", (2, 3, 32, 20), (48, 41)),
        ("cubic", "bicubic", (2, 16, 40, 32), (20, 17)),
        ("linear", "bilinear", (2, 3, 32, 20), (48, 41)),
        ("linear", "trilinear", (2, 3, 7, 9, 12), (8, 18, 24)),
    ],
)
def test_large_images_resized_by_products_equal_torchs_interpolation(
    coordinates: str, mode: str, torch_mode: str, shape: tuple[int, ...], target: tuple[int, ...]
) -> None:
    """In float64, to rounding; both gradients, whatever the layout."""
    attributes = {"mode": mode, "coordinate_transformation_mode": coordinates}
    for memory_format in (torch.contiguous_format, torch.channels_last if len(shape) == 4 else torch.channels_last_3d):
        X = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=memory_format).requires_grad_()
        with FlopCounterMode(display=False) as products:
            Y = resize(X, sizes=(*shape[:2], *target), **attributes)  # type: ignore[arg-type]
        assert Y.shape == (*shape[:2], *target)
        assert (products.get_total_flops() == 0) == (mode == "linear" and not X.is_contiguous())
        by_torch = F.interpolate(X, target, mode=torch_mode, align_corners=coordinates == "align_corners")
        weights = torch.randn_like(Y)
        gradients = [torch.autograd.grad((one * weights).sum(), X)[0] for one in (Y, by_torch)]
        torch.testing.assert_close(Y, by_torch, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)

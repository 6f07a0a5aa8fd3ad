"""Sampling, regions and boxes equal onnxruntime's and torch's; gradients by finite differences in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator

from onward.errors import NodeError
from onward.lowering.ops.vision import _grid_sample_any_rank
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, normal, run, to_array

RANDOM = np.random.default_rng(0)
_draw = normal(RANDOM)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("align", [0, 1])
def test_grid_sample_equals_onnxruntime_and_has_gradients(align: int, mode: str, padding: str) -> None:
    """Places far outside included."""
    attributes = {"align_corners": align, "mode": mode, "padding_mode": padding}
    X, grid = _draw(2, 3, 4, 5), _draw(2, 3, 2, 2, spread=1.2)
    check_against_onnxruntime(
        make_model("GridSample", {"X": X, "grid": grid}, attributes, 20), X, grid, rtol=1e-4, atol=1e-4
    )
    old = attributes | {"mode": {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)}
    check_against_onnxruntime(make_model("GridSample", {"X": X, "grid": grid}, old, 16), X, grid, rtol=1e-4, atol=1e-4)
    doubled = [X.astype(float)[:1], grid.astype(float)[:1]]
    check_gradients(make_model("GridSample", dict(zip(("X", "grid"), doubled, strict=True)), attributes, 22), *doubled)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("align", [False, True])
def test_sampling_of_any_rank_equals_torch_where_torch_has_it(align: bool, mode: str, padding: str) -> None:
    named = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}[mode]
    for sizes in ((4, 5), (4, 5, 3)):
        if mode == "cubic" and len(sizes) == 3:
            continue
        X = torch.randn(2, 3, *sizes, dtype=torch.float64)
        grid = torch.randn(2, *[2] * len(sizes), len(sizes), dtype=torch.float64) * 1.5
        expected = F.grid_sample(X, grid, named, padding, align)
        torch.testing.assert_close(_grid_sample_any_rank(X, grid, mode, padding, align), expected)


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grid_sample_of_one_axis_is_that_of_two_with_one_row(mode: str) -> None:
    X, grid = _draw(2, 3, 6), _draw(2, 4, 1)
    wide = np.concatenate([grid[:, None], np.zeros_like(grid[:, None])], -1)
    attributes = {"mode": mode, "padding_mode": "border"}
    expected = run(make_model("GridSample", {"X": X[:, :, None], "grid": wide}, attributes, 20), X[:, :, None], wide)
    actual = run(make_model("GridSample", {"X": X, "grid": grid}, attributes, 20), X, grid)
    torch.testing.assert_close(actual, expected[:, :, 0])


def test_cubic_sampling_of_a_volume_equals_the_reference() -> None:
    X, grid = _draw(1, 2, 3, 4, 3), _draw(1, 2, 2, 2, 3, spread=0.7)
    attributes = {"mode": "cubic", "padding_mode": "border"}
    model = make_model("GridSample", {"X": X, "grid": grid}, attributes, 20)
    expected = ReferenceEvaluator(model).run(None, {"X": X, "grid": grid})[0]
    np.testing.assert_allclose(to_array(run(model, X, grid)), expected, rtol=1e-3, atol=1e-4)
    doubled = [X.astype(float), grid.astype(float)]
    check_gradients(make_model("GridSample", dict(zip(("X", "grid"), doubled, strict=True)), attributes, 20), *doubled)


def test_integers_are_sampled_as_numbers() -> None:
    X = np.array([[[[0, 10], [20, 30]]]], np.int32)
    grid = np.zeros((1, 1, 1, 2), np.float32)
    result = run(make_model("GridSample", {"X": X, "grid": grid}, {}, 22), X, grid)
    assert result.dtype == torch.int32
    assert result.item() == 15


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 2, 4, 5)])
def test_affine_grid_equals_onnxruntime_and_has_gradients(size: tuple[int, ...], align: int) -> None:
    rank = len(size) - 2
    theta, sizes = _draw(2, rank, rank + 1), np.array(size, np.int64)
    inputs = {"theta": theta, "size": None}
    model = make_model("AffineGrid", inputs, {"align_corners": align}, 20, 1, {"size": sizes})
    check_against_onnxruntime(model, theta, rtol=1e-4, atol=1e-5)
    inputs = {"theta": theta.astype(float), "size": None}
    model = make_model("AffineGrid", inputs, {"align_corners": align}, 20, 1, {"size": sizes})
    check_gradients(model, theta.astype(float))


ROIS = np.array([[0, 0, 3, 4], [1.3, 0.7, 6.1, 5.2], [-2, -1, 2.5, 3], [3, 2, 12, 9], [2, 2, 2.2, 2.1]], np.float32)
IMAGES = np.array([0, 1, 1, 0, 1], np.int64)


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize(("opset", "half"), [(10, None), (16, "half_pixel"), (16, "output_half_pixel"), (16, None)])
def test_roi_align_equals_onnxruntime(opset: int, half: str | None, mode: str, ratio: int) -> None:
    X = _draw(2, 3, 6, 7)
    attributes: dict[str, Any] = {"output_height": 3, "output_width": 2, "sampling_ratio": ratio, "mode": mode}
    attributes |= {"spatial_scale": 0.9} | ({"coordinate_transformation_mode": half} if half else {})
    model = make_model("RoiAlign", {"X": X, "rois": ROIS, "batch_indices": IMAGES}, attributes, opset)
    check_against_onnxruntime(model, X, ROIS, IMAGES, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align_gradients(mode: str, ratio: int) -> None:
    """Through the image, and for averages also through the regions."""
    X, rois = _draw(2, 2, 4, 5, dtype=float), ROIS[:3].astype(float) * 0.9
    attributes = {"output_height": 2, "output_width": 2, "sampling_ratio": ratio, "mode": mode}
    inputs = {"X": X, "rois": rois, "batch_indices": IMAGES[:3]}
    stored = {} if mode == "avg" else {"rois": rois}
    given = [value for name, value in inputs.items() if name not in stored]
    check_gradients(make_model("RoiAlign", inputs, attributes, 22, 1, stored), *given)


@pytest.mark.parametrize("center", [0, 1])
@pytest.mark.parametrize("opset", [10, 11])
def test_non_max_suppression_equals_onnxruntime(opset: int, center: int) -> None:
    """Ties, empty boxes, several images and classes, limits and thresholds."""
    corner = RANDOM.random((2, 12, 2)).astype(np.float32)
    boxes = np.concatenate(
        [corner, (corner if center == 0 else 0) + RANDOM.random((2, 12, 2)).astype(np.float32) * 0.4], 2
    )
    boxes[0, 3] = boxes[0, 2]
    boxes[1, 5, 2:] = boxes[1, 5, :2] if center == 0 else 0
    scores = (RANDOM.integers(0, 8, (2, 3, 12)) / 8).astype(np.float32)
    for most, overlap, least in ((3, 0.2, 0.3), (100, 0.5, None), (1, 0.0, 0.9), (0, 0.5, 0.1)):
        stored = {"most": np.array([most], np.int64), "overlap": np.array([overlap], np.float32)}
        if least is not None:
            stored["least"] = np.array([least], np.float32)
        inputs = {"boxes": boxes, "scores": scores}
        model = make_model("NonMaxSuppression", inputs, {"center_point_box": center}, opset, 1, stored)
        check_against_onnxruntime(model, boxes, scores)


def test_non_max_suppression_selects_nothing_by_default() -> None:
    boxes, scores = _draw(1, 3, 4), _draw(1, 2, 3)
    assert run(make_model("NonMaxSuppression", {"boxes": boxes, "scores": scores}, {}, 11), boxes, scores).shape == (
        0,
        3,
    )


@pytest.mark.parametrize(
    ("op_type", "shapes", "attributes", "message"),
    [
        ("GridSample", [(1, 1, 3, 3), (1, 2, 2, 2)], {"mode": "area"}, "mode is 'area'"),
        ("GridSample", [(1, 1, 3, 3), (1, 2, 2, 3)], {}, r"grid \[1, 2, 2, 3\]; for r spatial axes"),
        ("RoiAlign", [(1, 1, 3, 3), (1, 4), (1,)], {"mode": "median"}, "mode is 'median'"),
    ],
)
def test_bad_values_are_named(op_type: str, shapes: Any, attributes: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = {f"i{index}": _draw(*shape) for index, shape in enumerate(shapes)}
    if op_type == "RoiAlign":
        inputs["i2"] = np.zeros(1, np.int64)
    with pytest.raises(NodeError, match=message):
        run(make_model(op_type, inputs, attributes, 20), *inputs.values())

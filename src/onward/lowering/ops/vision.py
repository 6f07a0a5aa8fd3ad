"""Sampling on grids, regions of interest and boxes.

Legend: N batch, C channels, H height, W width, R regions, B boxes, K classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.sampling import Taps, cubic_taps, linear_taps, nearest_taps, pad_with_zeros, sample
from onward.lowering.passes import is_traced
from onward.lowering.registry import lowers

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_TAPS = {"linear": linear_taps, "nearest": nearest_taps, "cubic": cubic_taps}
_TORCH_MODE = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}
_OLD_MODE = {"bilinear": "linear", "bicubic": "cubic"}


@lowers("GridSample", since=16)
def grid_sample(
    X: Tensor, grid: Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__GridSample.html; X (N, C, D1..Dr), grid (N, O1..Or, r), innermost first.

    Before version 20 the modes are called "bilinear" and "bicubic". Integers are sampled in float64.
    """
    mode = _OLD_MODE.get(mode, mode)
    if mode not in _TAPS or padding_mode not in ("zeros", "border", "reflection"):
        raise ValueError(
            f"mode is {mode!r} and padding_mode {padding_mode!r}; expected linear, nearest or cubic, "
            "and zeros, border or reflection."
        )
    rank = X.dim() - 2
    if rank < 1 or grid.dim() != X.dim() or grid.shape[-1] != rank or grid.shape[0] != X.shape[0]:
        raise ValueError(
            f"X has shape {list(X.shape)} and grid {list(grid.shape)}; for r spatial axes of X the grid is "
            "(batch, r sizes of the result, r)."
        )
    # Places in low precision would miss the elements of a large image; integers are sampled in float64.
    wide = _WIDE.get(X.dtype, X.dtype) if X.is_floating_point() else torch.float64
    if wide != X.dtype:
        return _sample(X.to(wide), grid.to(wide), mode, padding_mode, bool(align_corners)).to(X.dtype)
    return _sample(X, grid.to(wide), mode, padding_mode, bool(align_corners))


def _sample(X: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> Tensor:
    rank = X.dim() - 2
    if (rank == 2 or (rank == 3 and mode != "cubic")) and not is_traced():
        return F.grid_sample(X, grid, _TORCH_MODE[mode], padding_mode, align_corners)
    return _grid_sample_any_rank(X, grid, mode, padding_mode, align_corners)


def _grid_sample_any_rank(X: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> Tensor:
    """What torch's kernel does for two axes, for any number of them."""
    along = []
    for axis, size in enumerate(X.shape[2:]):
        coordinate = grid[..., grid.shape[-1] - 1 - axis].flatten(1)
        along.append((coordinate + 1) / 2 * (size - 1) if align_corners else ((coordinate + 1) * size - 1) / 2)
    sizes = X.shape[2:]
    if mode != "cubic" and padding_mode != "zeros":
        along = [
            _into_range(place, size, padding_mode, align_corners) for place, size in zip(along, sizes, strict=True)
        ]

    def pad(index: Tensor, axis: int) -> tuple[Tensor, Tensor | None]:
        place = index.to(X.dtype)
        return _into_range(place, sizes[axis], padding_mode, align_corners).round().to(torch.int64), None

    taps = [_TAPS[mode](place) for place in along]
    sampled = sample(X, taps, pad_with_zeros(X) if padding_mode == "zeros" else pad)
    return sampled.reshape(*X.shape[:2], *grid.shape[1:-1])


def _into_range(place: Tensor, size: int, padding_mode: str, align_corners: bool) -> Tensor:
    """Places outside of an axis moved to its border, or reflected at it until they are inside."""
    if padding_mode == "reflection":
        low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(place)
        distance = (place - low).abs()
        times = (distance / span).floor()
        rest = distance - times * span
        place = torch.where(times % 2 == 0, rest, span - rest) + low
    return place.clamp(0, size - 1)


@lowers("AffineGrid", since=20, host=("size",))
def affine_grid(theta: Tensor, size: tuple[int, ...], *, align_corners: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__AffineGrid.html; theta (N, 2, 3) or (N, 3, 4), size (N, C, D1..Dn)."""
    return F.affine_grid(theta, list(size), align_corners=bool(align_corners))


@lowers("RoiAlign", since=16)
def roi_align(
    X: Tensor,
    rois: Tensor,
    batch_indices: Tensor,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__RoiAlign.html; X (N, C, H, W), rois (R, 4) as [x1, y1, x2, y2].

    The average of bilinear samples is linear along each axis: two products with matrices of weights. "max" is, as
    in the standard's reference, the largest weighted corner of any sample. `sampling_ratio=0` takes as many samples
    as the largest region needs, which waits for the device.
    """
    dtype, X = X.dtype, X.to(_WIDE.get(X.dtype, X.dtype))
    half = coordinate_transformation_mode == "half_pixel"
    scaled = rois.to(X.dtype) * spatial_scale - (0.5 if half else 0.0)
    axes = []
    for first, last, bins, size in (
        (scaled[:, 1], scaled[:, 3], output_height, X.shape[2]),
        (scaled[:, 0], scaled[:, 2], output_width, X.shape[3]),
    ):
        length = last - first if half else (last - first).clamp(min=1.0)
        axes.append(_roi_taps(first, length, bins, size, sampling_ratio))
    images = batch_indices.to(torch.int64)
    if mode == "avg":
        return _roi_average(X, images, axes).to(dtype)
    if mode != "max":
        raise ValueError(f"mode is {mode!r}; expected 'avg' or 'max'.")
    return _roi_largest(X, images, axes).to(dtype)


@lowers("RoiAlign", since=10)
def roi_align_10(
    X: Tensor,
    rois: Tensor,
    batch_indices: Tensor,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Tensor:
    """https://onnx.ai/onnx/operators/text_diff_RoiAlign_10_16.html: regions are not shifted by half an element."""
    return roi_align(
        X,
        rois,
        batch_indices,
        coordinate_transformation_mode="output_half_pixel",
        mode=mode,
        output_height=output_height,
        output_width=output_width,
        sampling_ratio=sampling_ratio,
        spatial_scale=spatial_scale,
    )


def _roi_taps(first: Tensor, length: Tensor, bins: int, size: int, ratio: int) -> tuple[Taps, Tensor]:
    """Along one axis, for R regions and S samples a bin: taps (R, bins, S), and which samples count, likewise."""
    step = (length / bins)[:, None, None]
    counts = torch.full_like(length, ratio) if ratio > 0 else step[:, 0, 0].detach().ceil().clamp(min=0)
    samples = ratio if ratio > 0 else max(1, int(counts.max().item())) if counts.numel() else 1
    k = torch.arange(samples, device=length.device, dtype=length.dtype)
    b = torch.arange(bins, device=length.device, dtype=length.dtype)[:, None]
    places = first[:, None, None] + b * step + (k + 0.5) * step / counts.clamp(min=1)[:, None, None]
    counted = (k < counts[:, None, None]).expand(places.shape)
    inside = (places >= -1) & (places <= size)
    (low, far), (high, near) = linear_taps(places.clamp(0, size - 1))
    pairs = [(low, far), (high.clamp(max=size - 1), near)]
    return [(index, torch.where(inside & counted, weight, 0)) for index, weight in pairs], counted


def _roi_average(X: Tensor, images: Tensor, axes: list[tuple[Taps, Tensor]]) -> Tensor:
    N, C, H, W = X.shape
    matrices = []
    for (taps, counted), size in zip(axes, (H, W), strict=True):
        matrix = torch.zeros((*counted.shape[:2], size), dtype=X.dtype, device=X.device)
        for index, weight in taps:
            matrix = matrix.scatter_add(2, index, weight)
        matrices.append(matrix / counted.sum(2, keepdim=True).clamp(min=1).to(X.dtype))
    rows, columns = matrices
    # Every region's rows are laid over all images, zero but for its own: one product, no copy of X for each region.
    own = F.one_hot(images, N).to(X.dtype)
    over_all = (own[:, None, :, None] * rows[:, :, None, :]).flatten(2)
    lines = torch.matmul(over_all, X.transpose(1, 2).reshape(N * H, C * W))
    return torch.einsum("rpcw,rqw->rcpq", lines.reshape(*lines.shape[:2], C, W), columns)


def _roi_largest(X: Tensor, images: Tensor, axes: list[tuple[Taps, Tensor]]) -> Tensor:
    (row_taps, rows_counted), (column_taps, columns_counted) = axes
    R, P, S = rows_counted.shape
    Q, T = columns_counted.shape[1:]
    chosen = X.index_select(0, images)
    largest: Tensor | None = None
    for row, row_weight in row_taps:
        lines = chosen.gather(2, row.reshape(R, 1, P * S, 1).expand(-1, X.shape[1], -1, X.shape[3]))
        for column, column_weight in column_taps:
            index = column.reshape(R, 1, 1, Q * T).expand(-1, X.shape[1], P * S, -1)
            weight = row_weight.reshape(R, 1, P * S, 1) * column_weight.reshape(R, 1, 1, Q * T)
            corner = lines.gather(3, index) * weight
            largest = corner if largest is None else torch.maximum(largest, corner)
    assert largest is not None
    counted = rows_counted.reshape(R, 1, P * S, 1) & columns_counted.reshape(R, 1, 1, Q * T)
    bins = largest.masked_fill(~counted, -torch.inf).reshape(R, X.shape[1], P, S, Q, T).amax((3, 5))
    return torch.where(torch.isneginf(bins), 0, bins)


@lowers("NonMaxSuppression", since=10, host=("max_output_boxes_per_class",))
def non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    max_output_boxes_per_class: Any = None,
    iou_threshold: Tensor | None = None,
    score_threshold: Tensor | None = None,
    *,
    center_point_box: int = 0,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__NonMaxSuppression.html; boxes (N, B, 4), scores (N, K, B) -> (selected, 3).

    All images and classes go through the boxes together, from the highest score down; of equal scores the box with
    the lower number comes first.
    """
    most = max_output_boxes_per_class
    most = most[0] if isinstance(most, tuple) and most else most or 0
    overlapping = _overlap(boxes, bool(center_point_box)) > (
        0.0 if iou_threshold is None else iou_threshold.reshape(())
    )
    order = scores.argsort(dim=-1, descending=True, stable=True)
    alive = torch.ones_like(scores, dtype=torch.bool)
    if score_threshold is not None:
        alive = scores > score_threshold.reshape(())
    images = torch.arange(boxes.shape[0], device=boxes.device)[:, None]
    count = torch.zeros(scores.shape[:2], dtype=torch.int64, device=scores.device)
    kept = []
    for box in order.unbind(-1):
        selected = alive.gather(2, box[..., None])[..., 0] & (count < most)
        count = count + selected
        alive = alive & ~(overlapping[images, box] & selected[..., None])
        kept.append(selected)
    if not kept:
        return torch.zeros((0, 3), dtype=torch.int64, device=boxes.device)
    image, label, place = torch.stack(kept, dim=-1).nonzero(as_tuple=True)
    return torch.stack([image, label, order[image, label, place]], dim=1)


def _overlap(boxes: Tensor, centered: bool) -> Tensor:
    """Intersection over union of every two boxes of an image (N, B, B); zero where one of them is empty."""
    if centered:
        center, half = boxes[..., :2], boxes[..., 2:] / 2
        low, high = center - half, center + half
    else:
        low = torch.minimum(boxes[..., :2], boxes[..., 2:])
        high = torch.maximum(boxes[..., :2], boxes[..., 2:])
    area = (high - low).prod(-1)
    inner_low = torch.maximum(low[:, :, None], low[:, None])
    inner_high = torch.minimum(high[:, :, None], high[:, None])
    common = (inner_high - inner_low).clamp(min=0).prod(-1)
    union = area[:, :, None] + area[:, None] - common
    valid = (area[:, :, None] > 0) & (area[:, None] > 0) & (union > 0)
    return torch.where(valid, common / torch.where(valid, union, 1), 0)

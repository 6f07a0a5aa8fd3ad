"""Pooling over windows, over entire images, and its inverses.

Legend: N batch, C channels, D1...Dn spatial axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.average_pooling import pool_average
from onward.lowering.kernels.dtypes import wide_on_cpus
from onward.lowering.kernels.max_pooling import pool_max
from onward.lowering.kernels.rematerialize import saved_tensor_hook
from onward.lowering.kernels.wide_gradients import with_wide_gradient
from onward.lowering.kernels.windows import Windows, check_length, lay_windows, pad_spatial, split_pads
from onward.lowering.registry import lowers

_MAX_POOL: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _pool_average_3d(X: Tensor, *along: Any) -> Tensor:
    """torch has no kernel of 16 bits for a CPU."""
    return F.avg_pool3d(X.to(wide_on_cpus(X)), *along).to(X.dtype)


_AVERAGE_POOL: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: pool_average, 3: _pool_average_3d}


def _spatial(X: Tensor) -> Sequence[int]:
    if X.dim() < 3:
        raise ValueError(f"X has shape {list(X.shape)}; pooling takes (batch, channels, spatial axes).")
    return X.shape[2:]


@lowers("MaxPool", since=1)
def max_pool(
    X: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: tuple[int, ...] | None = None,
    kernel_shape: tuple[int, ...],
    pads: tuple[int, ...] | None = None,
    storage_order: int = 0,
    strides: tuple[int, ...] | None = None,
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__MaxPool.html; outputs Y and Indices (int64).

    Indices count elements of the full X in row-major order; with `storage_order=1` the spatial axes within
    one channel are counted with the first axis fastest.
    """
    spatial = _spatial(X)
    windows = lay_windows(spatial, kernel_shape, strides, dilations, pads, auto_pad, bool(ceil_mode))
    # 8-bit integers are exact in float32, and torch pools only floats.
    values = X if X.is_floating_point() else X.to(torch.float32)
    n = len(spatial)
    # torch pads alike on both sides and by at most half of the kernel. It also takes kernels that step over the entire
    # image, and then its backward pass writes where it must not (`max_pool2d`, 2.13 and before).
    axes = zip(windows.begin, windows.kernel, windows.dilation, spatial, strict=True)
    direct = windows.symmetric and all(2 * p <= k and (not p or d <= size) for p, k, d, size in axes)
    if direct:
        padding, origin, extent, ceiling = windows.begin, (0,) * n, tuple(spatial), bool(ceil_mode)
    else:
        end = windows.covering_end(spatial)
        values = pad_spatial(values, windows.begin, end, -math.inf)
        padding, origin, ceiling = (0,) * n, windows.begin, False
        extent = tuple(values.shape[2:])
    along = (windows.kernel, windows.stride, padding, windows.dilation)
    Y, places = _pool_max(values, along, ceiling, output_count > 1)
    if places is None:
        return (Y.to(X.dtype),)
    return Y.to(X.dtype), _flat_indices(places, X.shape, extent, origin, storage_order)


def _pool_max(
    X: Tensor, along: tuple[Sequence[int], ...], ceiling: bool, want_indices: bool
) -> tuple[Tensor, Tensor | None]:
    """The maxima and, if wanted, their places within a channel, over any number of spatial axes.

    `along` holds kernel, stride, padding and dilation. A window over more axes than torch pools is the maximum over
    its leading axes of the maxima over its last three.
    """
    n = X.dim() - 2
    if n <= 3 and not want_indices:
        return pool_max(X, along, ceiling), None
    if n <= 3:
        Y, places = _MAX_POOL[n](X, *along, ceiling, return_indices=True)
        return Y, places
    last = tuple(range(-3, 0))
    Y, inner = _pool_max(X.flatten(1, n - 2), tuple(one[-3:] for one in along), ceiling, want_indices)

    def leading(pooled: Tensor) -> Tensor:
        """(N, C*D1*..*Dn-3, last three) -> (N, C*last three, D1, .., Dn-3)."""
        return pooled.reshape(*X.shape[:-3], *pooled.shape[2:]).movedim(last, (2, 3, 4)).flatten(1, 4)

    outer, places = _pool_max(leading(Y), tuple(one[:-3] for one in along), ceiling, want_indices)
    shape = (*X.shape[:2], *Y.shape[2:], *outer.shape[2:])
    if places is not None and inner is not None:
        within = leading(inner).flatten(2).gather(2, places.flatten(2)).reshape(places.shape)
        places = (places * math.prod(X.shape[-3:]) + within).reshape(shape).movedim((2, 3, 4), last)
    return outer.reshape(shape).movedim((2, 3, 4), last), places


def _flat_indices(
    places: Tensor, shape: Sequence[int], extent: Sequence[int], origin: Sequence[int], storage_order: int
) -> Tensor:
    """torch's indices within one padded channel become ONNX's within the full unpadded tensor."""
    coordinates = []
    for size in reversed(extent):
        coordinates.append(places % size)
        places = places // size
    coordinates = [c - o for c, o in zip(reversed(coordinates), origin, strict=True)]
    spatial = list(shape[2:])
    if storage_order:
        coordinates, spatial = coordinates[::-1], spatial[::-1]
    flat = torch.zeros_like(coordinates[0])
    for coordinate, size in zip(coordinates, spatial, strict=True):
        flat = flat * size + coordinate
    channels = torch.arange(shape[0] * shape[1], device=flat.device) * math.prod(spatial)
    return flat + channels.reshape(shape[0], shape[1], *[1] * len(spatial))


@lowers("AveragePool", since=1)
def average_pool(
    X: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: tuple[int, ...] | None = None,
    kernel_shape: tuple[int, ...],
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__AveragePool.html; the divisor counts the elements that a window meets.

    Padding counts with `count_include_pad=1` (version 7 on), but never what a last window of `ceil_mode` covers
    beyond the padding.
    """
    spatial = _spatial(X)
    windows = lay_windows(spatial, kernel_shape, strides, dilations, pads, auto_pad, bool(ceil_mode))
    if _is_global(windows, spatial):
        return global_average_pool(X)
    half = all(2 * p <= k for p, k in zip(windows.begin, windows.kernel, strict=True))
    pool = _AVERAGE_POOL.get(len(spatial))
    if pool is not None and windows.symmetric and half and set(windows.dilation) == {1}:
        along = windows.kernel, windows.stride, windows.begin, bool(ceil_mode), bool(count_include_pad)
        with saved_tensor_hook(X):
            return with_wide_gradient(lambda tensor: pool(tensor, *along), X)
    return _sum_windows(X, windows) / _window_counts(X, windows, bool(count_include_pad))


def _is_global(windows: Windows, spatial: Sequence[int]) -> bool:
    """Whether there is one window, over the entire image and nothing else.

    Some are written much larger than any image, over all of which compiled code would loop.
    """
    axes = zip(windows.sizes, windows.begin, windows.end, windows.kernel, windows.dilation, spatial, strict=True)
    return all((n, b, e, d) == (1, 0, 0, 1) and k >= size for n, b, e, k, d, size in axes)


def _sum_windows(X: Tensor, windows: Windows) -> Tensor:
    """The sum of each window, zero beyond the edges."""
    return with_wide_gradient(lambda tensor: _sum_windows_of(tensor, windows), X)


def _sum_windows_of(X: Tensor, windows: Windows) -> Tensor:
    pool = _AVERAGE_POOL.get(len(windows.kernel))
    padded = pad_spatial(X, windows.begin, windows.covering_end(X.shape[2:]))
    if pool is not None and set(windows.dilation) == {1}:
        return pool(padded, windows.kernel, windows.stride) * math.prod(windows.kernel)
    # Axis by axis; a convolution with ones would round what it sums up to TF32 on a GPU.
    for axis, (size, stride, dilation) in enumerate(
        zip(windows.kernel, windows.stride, windows.dilation, strict=True), 2
    ):
        padded = padded.unfold(axis, (size - 1) * dilation + 1, stride)[..., ::dilation].sum(-1)
    return padded


def _window_counts(X: Tensor, windows: Windows, include_padding: bool) -> Tensor:
    """How many elements each window averages: (sizes of the spatial axes)."""
    n = len(windows.kernel)
    counts = torch.ones((), dtype=X.dtype, device=X.device)
    for axis, size in enumerate(X.shape[2:]):
        start = torch.arange(windows.sizes[axis], device=X.device) * windows.stride[axis] - windows.begin[axis]
        within = torch.arange(windows.kernel[axis], device=X.device) * windows.dilation[axis]
        places = start[:, None] + within
        low = -windows.begin[axis] if include_padding else 0
        high = size + windows.end[axis] if include_padding else size
        count = ((places >= low) & (places < high)).sum(1)
        counts = counts * count.to(X.dtype).reshape([-1 if i == axis else 1 for i in range(n)])
    return counts


@lowers("LpPool", since=1)
def lp_pool(
    X: Tensor,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: tuple[int, ...] | None = None,
    kernel_shape: tuple[int, ...],
    p: float = 2,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__LpPool.html: the p-norm of each window; padding counts as zero."""
    windows = lay_windows(_spatial(X), kernel_shape, strides, dilations, pads, auto_pad, bool(ceil_mode))
    return _root(_sum_windows(X.abs() ** p, windows), p)


def _root(sums: Tensor, p: float) -> Tensor:
    """The p-th root, with gradient zero where the sum is zero."""
    if p == 1:
        return sums
    positive = sums > 0
    return torch.where(positive, torch.where(positive, sums, 1) ** (1 / p), 0)


@lowers("GlobalAveragePool", since=1)
def global_average_pool(X: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__GlobalAveragePool.html; (N, C, D1..Dn) -> (N, C, 1..1)."""
    return X.mean(dim=tuple(range(2, X.dim())), keepdim=True)


@lowers("GlobalMaxPool", since=1)
def global_max_pool(X: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__GlobalMaxPool.html; (N, C, D1..Dn) -> (N, C, 1..1)."""
    return X.amax(dim=tuple(range(2, X.dim())), keepdim=True)


@lowers("GlobalLpPool", since=1)
def global_lp_pool(X: Tensor, *, p: float = 2) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__GlobalLpPool.html; (N, C, D1..Dn) -> (N, C, 1..1)."""
    return _root((X.abs() ** p).sum(dim=tuple(range(2, X.dim())), keepdim=True), p)


@lowers("MaxUnpool", since=9, host=("output_shape",))
def max_unpool(
    X: Tensor,
    I: Tensor,  # noqa: E741
    output_shape: tuple[int, ...] | None = None,
    *,
    kernel_shape: tuple[int, ...],
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__MaxUnpool.html; I counts elements of the full unpooled tensor.

    The indices refer to the tensor that the attributes imply; a larger `output_shape` adds zeros at the ends,
    as the standard's example does.
    """
    n = X.dim() - 2
    check_length("kernel_shape", kernel_shape, n)
    stride = strides or (1,) * n
    begin, end = split_pads(pads, n)
    implied = [
        (size - 1) * s - b - e + k
        for size, s, b, e, k in zip(X.shape[2:], stride, begin, end, kernel_shape, strict=True)
    ]
    empty = torch.zeros(X.shape[0] * X.shape[1] * math.prod(implied), dtype=X.dtype, device=X.device)
    Y = empty.scatter(0, I.flatten(), X.flatten()).reshape(*X.shape[:2], *implied)
    if output_shape is None:
        return Y
    missing = [wanted - size for wanted, size in zip(output_shape[2:], implied, strict=True)]
    if min(missing) < 0:
        raise ValueError(f"output_shape is {list(output_shape)}, smaller than the unpooled {list(Y.shape)}.")
    return pad_spatial(Y, (0,) * n, missing)


@lowers("MaxRoiPool", since=1)
def max_roi_pool(X: Tensor, rois: Tensor, *, pooled_shape: tuple[int, ...], spatial_scale: float = 1.0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__MaxRoiPool.html; X (N, C, H, W), rois (R, 5) -> (R, C, *pooled_shape).

    A row of `rois` is [batch, x1, y1, x2, y2], the last element included; a bin without elements is zero.
    """
    scaled = rois[:, 1:].to(torch.float32) * spatial_scale
    # Halves are rounded away from zero, as the C function does that the original operator calls.
    scaled = scaled.sign() * (scaled.abs() + 0.5).floor()
    rows = _bins(scaled[:, 1], scaled[:, 3], pooled_shape[0], X.shape[2])
    columns = _bins(scaled[:, 0], scaled[:, 2], pooled_shape[1], X.shape[3])
    Y = X[rois[:, 0].to(torch.int64)]
    lowest = -math.inf
    Y = Y.unsqueeze(3).masked_fill(~columns[:, None, None], lowest).amax(-1)
    Y = Y.transpose(2, 3).unsqueeze(3)
    Y = Y.transpose(2, 3).masked_fill(~rows[:, None, :, None], lowest).amax(-1)
    return torch.where(torch.isneginf(Y), 0, Y)


def _bins(first: Tensor, last: Tensor, count: int, size: int) -> Tensor:
    """Which elements of an axis belong to which bin of each region: bool (R, count, size)."""
    length = (last - first + 1).clamp(min=1)[:, None] / count
    bins = torch.arange(count, device=first.device)
    start = ((bins * length).floor() + first[:, None]).clamp(0, size)
    end = (((bins + 1) * length).ceil() + first[:, None]).clamp(0, size)
    places = torch.arange(size, device=first.device)
    return (places >= start[..., None]) & (places < end[..., None])

"""Convolution, transposed convolution and deformable convolution.

Legend: N batch, C input channels, M output channels, g groups, D1...Dn spatial axes, k1...kn kernel sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.convolution_gradients import convolution
from onward.lowering.kernels.layout import convolve_images
from onward.lowering.kernels.sampling import linear_taps, pad_with_zeros, sample
from onward.lowering.kernels.windows import (
    check_length,
    lay_windows,
    pad_spatial,
    per_axis,
    split_pads,
    split_total,
)
from onward.lowering.registry import lowers
from onward.lowering.simplification import simplifies

_CONVOLVE_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    1: F.conv_transpose1d,
    2: F.conv_transpose2d,
    3: F.conv_transpose3d,
}


@lowers("Conv", since=1)
def conv(
    X: Tensor,
    W: Tensor,
    B: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: tuple[int, ...] | None = None,
    group: int = 1,
    kernel_shape: tuple[int, ...] | None = None,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
    channels_last_images: bool = True,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Conv.html; X (N, C, D1..Dn), W (M, C/g, k1..kn), B (M)."""
    spatial = _check_weight(X, W, kernel_shape)
    if X.shape[1] != W.shape[1] * group:
        raise ValueError(
            f"X has {X.shape[1]} channels, but W of shape {list(W.shape)} with group={group} takes "
            f"{W.shape[1] * group}."
        )
    windows = lay_windows(spatial, W.shape[2:], strides, dilations, pads, auto_pad)
    padding: tuple[int, ...] = windows.begin
    if not windows.symmetric or min(windows.begin) < 0:
        X = pad_spatial(X, windows.begin, windows.end)
        padding = (0,) * len(spatial)
    return convolve(X, W, B, windows.stride, padding, windows.dilation, group, channels_last_images)


def _check_weight(X: Tensor, W: Tensor, kernel_shape: Sequence[int] | None) -> Sequence[int]:
    if X.dim() < 3 or W.dim() != X.dim():
        raise ValueError(
            f"X has shape {list(X.shape)} and W {list(W.shape)}; both need the same rank, at least 3 "
            "(batch, channels, spatial axes)."
        )
    if kernel_shape and tuple(kernel_shape) != tuple(W.shape[2:]):
        raise ValueError(f"kernel_shape is {list(kernel_shape)}, but W has the kernel {list(W.shape[2:])}.")
    return X.shape[2:]


def convolve(
    X: Tensor,
    W: Tensor,
    B: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    group: int,
    channels_last_images: bool = True,
) -> Tensor:
    """The convolution over any number of spatial axes, as many as X has in addition to batch and channels."""
    n = X.dim() - 2
    if n == 2:
        return convolve_images(X, W, B, tuple(stride), tuple(padding), tuple(dilation), group, channels_last_images)
    if n in (1, 3):
        return convolution(X, W, B, stride, padding, dilation, group)
    return _convolve_many_axes(X, W, B, stride, padding, dilation, group, channels_last_images)


def _convolve_many_axes(
    X: Tensor,
    W: Tensor,
    B: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    group: int,
    channels_last_images: bool,
) -> Tensor:
    """More than three spatial axes: a sum over the first axis's kernel of convolutions with one axis less."""
    X = pad_spatial(X, padding, padding)
    kernel = W.shape[2]
    count = (X.shape[2] - (kernel - 1) * dilation[0] - 1) // stride[0] + 1
    total: Tensor | None = None
    for k in range(kernel):
        start = k * dilation[0]
        taken = X[:, :, start : start + (count - 1) * stride[0] + 1 : stride[0]]
        batched = taken.transpose(1, 2).flatten(0, 1)
        padding = (0,) * (len(stride) - 1)
        part = convolve(batched, W[:, :, k], None, stride[1:], padding, dilation[1:], group, channels_last_images)
        total = part if total is None else total + part
    assert total is not None
    Y = total.reshape(X.shape[0], count, *total.shape[1:]).transpose(1, 2)
    return Y if B is None else Y + B.reshape(-1, *[1] * (Y.dim() - 2))


@lowers("ConvTranspose", since=1)
def conv_transpose(
    X: Tensor,
    W: Tensor,
    B: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: tuple[int, ...] | None = None,
    group: int = 1,
    kernel_shape: tuple[int, ...] | None = None,
    output_padding: tuple[int, ...] | None = None,
    output_shape: tuple[int, ...] | None = None,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__ConvTranspose.html; X (N, C, D1..Dn), W (C, M/g, k1..kn), B (M).

    `output_shape` gives the spatial sizes (a leading N, C is accepted, as onnxruntime does) and decides the padding.
    """
    spatial = _check_weight(X, W, kernel_shape)
    n = len(spatial)
    if X.shape[1] != W.shape[0]:
        raise ValueError(f"X has {X.shape[1]} channels, but W of shape {list(W.shape)} takes {W.shape[0]}.")
    stride, dilation = per_axis("strides", strides, n), per_axis("dilations", dilations, n)
    extra = tuple(output_padding) if output_padding else (0,) * n
    check_length("output_padding", extra, n)
    unpadded = [
        s * (size - 1) + (k - 1) * d + 1 + o
        for size, k, s, d, o in zip(spatial, W.shape[2:], stride, dilation, extra, strict=True)
    ]
    begin, end = _transposed_pads(spatial, unpadded, stride, pads, auto_pad, output_shape)
    is_apart = tuple(stride) == tuple(W.shape[2:]) and group == 1 == max(dilation)
    if is_apart and X.is_cpu and X.dtype == W.dtype and not any((*extra, *begin, *end)):
        return _lay_side_by_side(X, W, B)
    # torch takes output_padding only below the stride or dilation, and pads alike on both sides.
    direct = n in _CONVOLVE_TRANSPOSED and all(b >= 0 and b == e for b, e in zip(begin, end, strict=True))
    if direct and all(o < max(s, d) for o, s, d in zip(extra, stride, dilation, strict=True)):
        return _CONVOLVE_TRANSPOSED[n](X, W, B, stride, begin, extra, group, dilation)
    Y = _convolve_transposed(X, W, stride, dilation, group)
    Y = pad_spatial(Y, [-b for b in begin], [o - e for o, e in zip(extra, end, strict=True)])
    return Y if B is None else Y + B.reshape(-1, *[1] * n)


def _lay_side_by_side(X: Tensor, W: Tensor, B: Tensor | None) -> Tensor:
    """A transposed convolution whose results do not overlap: one product for each element, and its blocks in place.

    torch's kernels on CPUs, one for each number of axes, take 1.1 to 2.5 times as long, forward and backward.
    """
    kernel, n = W.shape[2:], X.dim() - 2
    weight = W.permute(*range(2, n + 2), 1, 0).flatten(0, -2)  # (k1*..*kn*M, C)
    blocks = F.linear(X.movedim(1, -1), weight, None if B is None else B.repeat(math.prod(kernel)))
    blocks = blocks.reshape([*blocks.shape[:-1], *kernel, W.shape[1]])  # (N, D1..Dn, k1..kn, M)
    axes = [axis for i in range(1, n + 1) for axis in (i, i + n)]
    sizes = [size * k for size, k in zip(X.shape[2:], kernel, strict=True)]
    if n == 2:  # images leave with the channels last, as what is convolved does
        images = blocks.permute(0, *axes, -1).reshape([X.shape[0], *sizes, W.shape[1]])
        return images.movedim(-1, 1)
    return blocks.permute(0, -1, *axes).reshape([X.shape[0], W.shape[1], *sizes])


def _convolve_transposed(X: Tensor, W: Tensor, stride: Sequence[int], dilation: Sequence[int], group: int) -> Tensor:
    """The entire transposed convolution, nothing cut off or added, over any number of spatial axes."""
    n = X.dim() - 2
    if n in _CONVOLVE_TRANSPOSED:
        return _CONVOLVE_TRANSPOSED[n](X, W, None, tuple(stride), 0, 0, group, tuple(dilation))
    # Each element of the first axis's kernel spreads a result over the other axes, strided along the first.
    batched, kernel, (s, d) = X.transpose(1, 2).flatten(0, 1), W.shape[2], (stride[0], dilation[0])
    total: Tensor | None = None
    for k in range(kernel):
        part = _convolve_transposed(batched, W[:, :, k], stride[1:], dilation[1:], group)
        along = part.reshape(X.shape[0], X.shape[2], *part.shape[1:]).movedim(1, -1)
        spread = F.pad(along.unsqueeze(-1), (0, s - 1)).flatten(-2)
        placed = F.pad(spread, (k * d, (kernel - 1 - k) * d - (s - 1)))
        total = placed if total is None else total + placed
    assert total is not None
    return total.movedim(-1, 2)


def _transposed_pads(
    spatial: Sequence[int],
    unpadded: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[int] | None,
    auto_pad: str,
    output_shape: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is cut off at both sides of each axis of an output of `whole` elements; negative: added."""
    n = len(spatial)
    if output_shape:
        wanted = list(output_shape)[-n:]
        check_length("output_shape", wanted, n)
        return _split_transposed([w - o for w, o in zip(unpadded, wanted, strict=True)], auto_pad)
    if auto_pad.startswith("SAME"):
        totals = [w - size * s for w, size, s in zip(unpadded, spatial, stride, strict=True)]
        return _split_transposed([max(total, 0) for total in totals], auto_pad)
    if auto_pad == "VALID":
        return split_pads(None, n)
    return split_pads(pads, n)


def _split_transposed(totals: Sequence[int], auto_pad: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """SAME_UPPER: the odd one at the end; otherwise at the beginning, as the standard's formula says."""
    return split_total(totals, auto_pad if auto_pad == "SAME_UPPER" else "SAME_LOWER")


@simplifies(conv)
@simplifies(conv_transpose)
def _without_zero_bias(known: Mapping[str, Any], given: frozenset[str]) -> dict[str, Any]:
    """A constant bias of zeros, which torch's exporter writes unless it optimizes, is not added.

    On a GPU that would be a pass through the result, read and written.
    """
    bias = known.get("B")
    return {} if bias is None or bool(bias.any()) else {"B": None}


@lowers("DeformConv", since=19)
def deform_conv(
    X: Tensor,
    W: Tensor,
    offset: Tensor,
    B: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: tuple[int, ...] | None = None,
    group: int = 1,
    kernel_shape: tuple[int, ...] | None = None,
    offset_group: int = 1,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__DeformConv.html, https://arxiv.org/abs/1811.11168.

    Shapes, o the offset groups: X (N, C, D1..Dn), W (M, C/g, k1..kn), offset (N, o*k1*..*kn*n, O1..On),
    mask (N, o*k1*..*kn, O1..On), Y (N, M, O1..On). Every kernel element samples X linearly at its shifted place,
    zero outside; the columns so gathered meet the kernel in one product.
    """
    spatial = _check_weight(X, W, kernel_shape)
    n, kernel = len(spatial), tuple(W.shape[2:])
    windows = lay_windows(spatial, kernel, strides, dilations, pads, "NOTSET")
    N, C, elements = X.shape[0], X.shape[1], math.prod(kernel)
    # Places in low precision would miss the elements of a large image.
    low = offset.dtype in (torch.float16, torch.bfloat16)
    offset = offset.to(torch.float32) if low else offset
    places = offset.reshape(N, offset_group, elements, n, *windows.sizes)
    base = _window_places(kernel, windows.dilation, windows.stride, windows.begin, windows.sizes, offset)
    places = (places + base).movedim(3, 0).reshape(n, N * offset_group, -1)
    grouped = X.reshape(N * offset_group, C // offset_group, *spatial)
    sampled = sample(grouped, [linear_taps(along) for along in places.unbind(0)], pad_with_zeros(grouped))
    columns = sampled.to(X.dtype).reshape(N, offset_group, C // offset_group, elements, *windows.sizes)
    if mask is not None:
        columns = columns * mask.reshape(N, offset_group, 1, elements, *windows.sizes)
    columns = columns.reshape(N, group, C // group * elements, -1)
    weights = W.reshape(group, W.shape[0] // group, -1)
    Y = torch.matmul(weights, columns).reshape(N, W.shape[0], *windows.sizes)
    return Y if B is None else Y + B.reshape(-1, *[1] * n)


def _window_places(
    kernel: Sequence[int],
    dilation: Sequence[int],
    stride: Sequence[int],
    begin: Sequence[int],
    sizes: Sequence[int],
    like: Tensor,
) -> Tensor:
    """Where each kernel element of each window is in the input: (k1*..*kn, n, O1..On), in elements."""
    n = len(kernel)
    axes = []
    for axis in range(n):
        within = torch.arange(kernel[axis], device=like.device, dtype=like.dtype) * dilation[axis]
        start = torch.arange(sizes[axis], device=like.device, dtype=like.dtype) * stride[axis] - begin[axis]
        within = within.reshape([-1 if i == axis else 1 for i in range(n)] + [1] * n)
        start = start.reshape([1] * n + [-1 if i == axis else 1 for i in range(n)])
        axes.append((within + start).expand(*kernel, *sizes).flatten(0, n - 1))
    return torch.stack(axes, dim=1)

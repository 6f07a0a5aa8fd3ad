"""Pooling of images by their maxima, which keeps a byte for the place of each maximum.

torch keeps eight, counted from the image's corner: as much as two float32 of the result, and half of what went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.dtypes import wide_type
from onward.lowering.kernels.layout import has_channels_last
from onward.lowering.kernels.rematerialize import saved_tensor_hook
from onward.lowering.kernels.wide_gradients import rounds_each
from onward.lowering.passes import is_plain

LEAST_BYTES = 2**19
"""Places that take less as torch keeps them stay as they are."""
PLACES_BYTES = 2**20
"""Places in full at a time."""


def pool_max(X: Tensor, along: Sequence[Sequence[int]], ceiling: bool) -> Tensor:
    """`max_pool2d` of X [N, C, D1, D2]; `along` holds kernel, stride, padding and dilation of both axes."""
    kernel, stride, padding, dilation = (list(one) for one in along)
    is_trained = X.requires_grad and torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        # Code that torch's compiler writes for a CPU takes up to four times as long where windows overlap.
        if is_trained and X.is_cpu:
            pooled: Tensor = _pool(X, kernel, stride, padding, dilation, ceiling)[0]
            return pooled
    elif is_trained and is_plain(X) and (keeps_bytes(X.numel(), stride) or rounds_each(X)):
        result: Tensor = _MaxPool.apply(X, kernel, stride, padding, dilation, ceiling)  # type: ignore[no-untyped-call]
        return result
    with saved_tensor_hook(X):
        return F.max_pool2d(X, kernel, stride, padding, dilation, ceiling)


def keeps_bytes(count: int, stride: Sequence[int]) -> bool:
    """Whether the places of so many numbers' maxima are worth keeping in a byte each."""
    return 8 * count >= LEAST_BYTES * stride[0] * stride[1]


class _MaxPool(torch.autograd.Function):
    """torch's own pooling; a place is how far it is behind its window's first, which fits a byte or two."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, *along: Any) -> Tensor:
        """Keeps the places, and nothing of X but its shape and layout."""
        result, behind = _pooled(X, *along)
        ctx.save_for_backward(behind)
        ctx.along, ctx.shape, ctx.is_last = along, X.shape, has_channels_last(X)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """torch's own, which can itself be differentiated; on a CPU with few of the places in full at a time."""
        (behind,) = ctx.saved_tensors
        return _gradient(gradients[0], behind, ctx.shape, ctx.is_last, *ctx.along), *(None for _ in ctx.along)


def _pooled(
    X: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceiling: bool
) -> tuple[Tensor, Tensor]:
    """The maxima, and how far the place of each is behind its window's first."""
    along = (kernel, stride, padding, dilation, ceiling)
    result, places = torch.ops.aten.max_pool2d_with_indices(X, *along)
    # Both wrap around in few bits, and what is left fits.
    dtype = _dtype_of_places(X, kernel, dilation)
    return result, places.to(dtype).sub_(_first_of_windows(X, result, stride, padding).to(dtype))


def _gradient(
    gradient: Tensor,
    behind: Tensor,
    shape: Sequence[int],
    is_last: bool,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceiling: bool,
) -> Tensor:
    layout, dtype = torch.channels_last if is_last else torch.contiguous_format, gradient.dtype
    if gradient.is_cpu and any(k > s for k, s in zip(kernel, stride, strict=True)):
        gradient = gradient.to(wide_type(dtype))  # 16 bits would be rounded at every window that a number is in
    # torch's kernel converts it, too, and takes five times as long for it.
    gradient = gradient.contiguous(memory_format=layout)
    of_x = torch.empty(tuple(shape), dtype=gradient.dtype, device=gradient.device, memory_format=layout)
    first = _first_of_windows(of_x, behind, stride, padding)
    pool, along = torch.ops.aten.max_pool2d_with_indices_backward, (kernel, stride, padding, dilation, ceiling)
    if torch.is_grad_enabled():  # for second derivatives
        differentiable: Tensor = pool(gradient, of_x, *along, behind.to(torch.int64).add_(first))
        return differentiable.to(dtype)
    each = max(1, 8 * behind[:1].numel())
    count = max(1, PLACES_BYTES // each) if behind.is_cpu else max(1, len(behind))
    for start in range(0, len(behind), count):
        part = slice(start, start + count)
        places = behind[part].to(torch.int64).add_(first)
        # Of an image torch asks nothing but its shape here.
        pool.grad_input(gradient[part], of_x[part], *along, places, grad_input=of_x[part])
    return of_x.to(dtype)


def _dtype_of_places(X: Tensor, kernel: Sequence[int], dilation: Sequence[int]) -> torch.dtype:
    height, width = ((k - 1) * d for k, d in zip(kernel, dilation, strict=True))
    farthest = height * X.shape[-1] + width
    return next(t for t in (torch.uint8, torch.int16, torch.int32, torch.int64) if farthest <= torch.iinfo(t).max)


def _first_of_windows(X: Tensor, result: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Where windows begin [O1, O2], counted row by row; in the padding also below zero."""
    row, column = (
        torch.arange(size, device=X.device) * s - p
        for size, s, p in zip(result.shape[-2:], stride, padding, strict=True)
    )
    first: Tensor = row[:, None] * X.shape[-1] + column
    return first


# ---------------------------------------------------------------------- in compiled code

_pool = torch.library.custom_op("onward::max_pool", _pooled, mutates_args=())
_pool_backward = torch.library.custom_op("onward::max_pool_backward", _gradient, mutates_args=())


@_pool.register_fake
def _(X: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceiling: bool) -> Any:
    result, _ = torch.ops.aten.max_pool2d_with_indices(X, kernel, stride, padding, dilation, ceiling)
    return result, torch.empty_like(result, dtype=_dtype_of_places(X, kernel, dilation))


@_pool_backward.register_fake
def _(gradient: Tensor, behind: Tensor, shape: Sequence[int], is_last: bool, *_: Any) -> Tensor:
    layout = torch.channels_last if is_last else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=gradient.dtype, device=gradient.device, memory_format=layout)


def _keep(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    X, *ctx.along = inputs
    ctx.shape, ctx.is_last = X.shape, has_channels_last(X)
    ctx.save_for_backward(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    (behind,) = ctx.saved_tensors
    return _pool_backward(gradient, behind, ctx.shape, ctx.is_last, *ctx.along), *(None for _ in ctx.along)


_pool.register_autograd(_differentiate, setup_context=_keep)

"""Pooling of images by their maxima, which keeps a byte for the place of each maximum.

torch keeps eight, counted from the image's corner: as much as two float32 of the result, and half of what went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.rematerialize import saved_tensor_hook
from onward.lowering.passes import is_plain

LEAST_BYTES = 2**19
"""Places that take less as torch keeps them stay as they are."""
PLACES_BYTES = 2**20
"""Places in full at a time."""


def pool_max(X: Tensor, along: Sequence[Sequence[int]], ceiling: bool) -> Tensor:
    """`max_pool2d` of X [N, C, D1, D2]; `along` holds kernel, stride, padding and dilation of both axes."""
    kernel, stride, padding, dilation = (list(one) for one in along)
    if _gains(X, stride):
        result: Tensor = _MaxPool.apply(X, kernel, stride, padding, dilation, ceiling)  # type: ignore[no-untyped-call]
        return result
    with saved_tensor_hook(X):
        return F.max_pool2d(X, kernel, stride, padding, dilation, ceiling)


def _gains(X: Tensor, stride: Sequence[int]) -> bool:
    is_trained = X.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling() and is_plain(X)
    return is_trained and 8 * X.numel() >= LEAST_BYTES * stride[0] * stride[1]


class _MaxPool(torch.autograd.Function):
    """torch's own pooling; a place is how far it is behind its window's first, which fits a byte or two."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, *along: Any) -> Tensor:
        """Keeps the places, and nothing of X but its shape and layout."""
        result, places = torch.ops.aten.max_pool2d_with_indices(X, *along)
        kernel, _, _, dilation, _ = along
        height, width = ((k - 1) * d for k, d in zip(kernel, dilation, strict=True))
        farthest = height * X.shape[-1] + width
        dtype = next(t for t in (torch.uint8, torch.int16, torch.int32, torch.int64) if farthest <= torch.iinfo(t).max)
        # Both wrap around in few bits, and what is left fits.
        behind = places.to(dtype).sub_(_first_of_windows(X, result, along).to(dtype))
        is_last = X.is_contiguous(memory_format=torch.channels_last) and not X.is_contiguous()
        ctx.layout = torch.channels_last if is_last else torch.contiguous_format
        ctx.save_for_backward(behind)
        ctx.along, ctx.shape = along, X.shape
        return result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """torch's own, which can itself be differentiated; on a CPU with few of the places in full at a time."""
        (behind,) = ctx.saved_tensors
        # torch's kernel converts it, too, and takes five times as long for it.
        gradient = gradients[0].contiguous(memory_format=ctx.layout)
        of_x = torch.empty(ctx.shape, dtype=gradient.dtype, device=gradient.device, memory_format=ctx.layout)
        first = _first_of_windows(of_x, behind, ctx.along)
        pool, others = torch.ops.aten.max_pool2d_with_indices_backward, (None for _ in ctx.along)
        if torch.is_grad_enabled():  # for second derivatives
            return pool(gradient, of_x, *ctx.along, behind.to(torch.int64).add_(first)), *others
        each = max(1, 8 * behind[:1].numel())
        count = max(1, PLACES_BYTES // each) if behind.is_cpu else max(1, len(behind))
        for start in range(0, len(behind), count):
            part = slice(start, start + count)
            places = behind[part].to(torch.int64).add_(first)
            # Of an image torch asks nothing but its shape here.
            pool.grad_input(gradient[part], of_x[part], *ctx.along, places, grad_input=of_x[part])
        return of_x, *others


def _first_of_windows(X: Tensor, result: Tensor, along: Sequence[Any]) -> Tensor:
    """Where windows begin [O1, O2], counted row by row; in the padding also below zero."""
    _, stride, padding, _, _ = along
    row, column = (
        torch.arange(size, device=X.device) * s - p
        for size, s, p in zip(result.shape[-2:], stride, padding, strict=True)
    )
    first: Tensor = row[:, None] * X.shape[-1] + column
    return first

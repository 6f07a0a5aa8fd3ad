"""Pooling of images by their means that keeps nothing: its gradient depends on no more of an image than its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.layout import has_channels_last
from onward.lowering.passes import is_plain

LEAST_BYTES = 2**18
"""Smaller images are kept by torch's own pooling, which begins sooner."""


def pool_average(
    X: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] = (0, 0),
    ceiling: bool = False,
    counts_padding: bool = True,
) -> Tensor:
    """`avg_pool2d` of X [N, C, D1, D2]; torch's own, which keeps X, of small images."""
    along: tuple[Any, ...] = (kernel, stride, padding, ceiling, counts_padding)
    is_trained = X.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling() and is_plain(X)
    if is_trained and X.numel() * X.element_size() >= LEAST_BYTES:
        result: Tensor = _AveragePool.apply(X, *along)  # type: ignore[no-untyped-call]
        return result
    return F.avg_pool2d(X, *along)


class _AveragePool(torch.autograd.Function):
    """torch's own pooling, and its gradient, for which torch asks nothing of X but its shape and layout."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, *along: Any) -> Tensor:
        """Keeps numbers only."""
        ctx.layout = torch.channels_last if has_channels_last(X) else torch.contiguous_format
        ctx.along, ctx.shape = along, X.shape
        return F.avg_pool2d(X, *along)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Can itself be differentiated."""
        gradient, others = gradients[0].contiguous(memory_format=ctx.layout), (None for _ in ctx.along)
        of_x = torch.empty(ctx.shape, dtype=gradient.dtype, device=gradient.device, memory_format=ctx.layout)
        pool, along = torch.ops.aten.avg_pool2d_backward, (*ctx.along, None)
        if torch.is_grad_enabled():  # for second derivatives
            return pool(gradient, of_x, *along), *others
        return pool.grad_input(gradient, of_x, *along, grad_input=of_x), *others

"""Dropout on CPUs from a quarter of the random numbers that torch draws, which keeps a byte for each element, not four.

Drawing is what it takes: torch spends 7 ns on each element, and on four of them here 5.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.passes import is_plain, is_traced

LEAST_ELEMENTS = 2**14
"""Of fewer, torch's kernel takes less time than the calls of several."""
BLOCK_ELEMENTS = 2**18
"""Whose random numbers are there at once, 16 bits each."""
_LEVELS = 2**16
LEAST_SHARE = 2**-6
"""Of what is dropped and of what is kept. Shares are multiples of 2**-16; of smaller ones that would be too coarse."""


def drop(X: Tensor, ratio: float) -> Tensor:
    """`F.dropout`: elements become zero with probability `ratio`, to 2**-17; the others are scaled to the same mean."""
    if torch.compiler.is_compiling() or is_traced() or not X.is_cpu or X.numel() < LEAST_ELEMENTS or not is_plain(X):
        return F.dropout(X, ratio)
    if not LEAST_SHARE <= ratio <= 1 - LEAST_SHARE:
        return F.dropout(X, ratio)
    result: Tensor = _Dropout.apply(X, round(ratio * _LEVELS))  # type: ignore[no-untyped-call]
    return result


class _Dropout(torch.autograd.Function):
    """Keeps which elements were kept."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, dropped_levels: int) -> Tensor:
        """Those with the lowest numbers are dropped."""
        kept = torch.empty_like(X, dtype=torch.bool)
        flat = kept.as_strided((kept.numel(),), (1,))
        numbers = torch.empty(BLOCK_ELEMENTS // 4, dtype=torch.int64)
        for start in range(0, kept.numel(), BLOCK_ELEMENTS):
            part = flat[start : start + BLOCK_ELEMENTS]
            drawn = numbers[: -(-len(part) // 4)].random_(-(2**63), None).view(torch.int16)
            torch.ge(drawn[: len(part)], dropped_levels - _LEVELS // 2, out=part)
        ctx.save_for_backward(kept)
        ctx.scale = _LEVELS / (_LEVELS - dropped_levels)
        return torch.where(kept, X, 0.0).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The same of gradients, which can itself be differentiated."""
        (kept,) = ctx.saved_tensors
        return torch.where(kept, gradients[0], 0.0).mul_(ctx.scale), None

"""Softmax of rows that are shorter than a vector of the CPU, for which torch computes number by number.

Such rows, as of a few experts or classes, took torch 20 ns a number and the few passes here 3 to 8, both ways less than
half in all; from 16 numbers on torch takes 2 (AVX-512, float32).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onward.lowering.passes import is_plain

LEAST_ELEMENTS = 4096
"""Of fewer, torch's own kernel takes less time than the calls of several."""


def softmax(x: Tensor, axis: int) -> Tensor:
    """`torch.softmax(x, axis)`, equal to 4 units in the last place."""
    return _Softmax.apply(x) if _is_short(x, axis) else torch.softmax(x, axis)  # type: ignore[no-untyped-call]


def log_softmax(x: Tensor, axis: int) -> Tensor:
    """`torch.log_softmax(x, axis)`, equal to 4 units in the last place of its largest term."""
    return _LogSoftmax.apply(x) if _is_short(x, axis) else torch.log_softmax(x, axis)  # type: ignore[no-untyped-call]


def _is_short(x: Tensor, axis: int) -> bool:
    """Whether torch computes it number by number; sizes are asked for last, since an answer fixes an open one."""
    if torch.compiler.is_compiling() or not (x.is_cpu and is_plain(x)) or torch.is_autocast_enabled("cpu"):
        return False
    if x.dtype not in (torch.float32, torch.float64) or axis not in (-1, x.dim() - 1) or x.numel() < LEAST_ELEMENTS:
        return False
    return x.shape[-1] < (16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8)


class _Softmax(torch.autograd.Function):
    """Over the last axis; keeps its result. Its gradient has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """`exp(x - max) / sum`."""
        result = (x - x.amax(-1, keepdim=True)).exp_()
        result.div_(result.sum(-1, keepdim=True))
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """`y (g - sum(g y))`."""
        (result,) = ctx.saved_tensors
        weighted = gradients[0] * result
        return torch.addcmul(weighted, result, weighted.sum(-1, keepdim=True), value=-1)


class _LogSoftmax(torch.autograd.Function):
    """Over the last axis; keeps its result. Its gradient has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """`x - max - log(sum(exp(x - max)))`."""
        result = x - x.amax(-1, keepdim=True)
        result.sub_(result.exp().sum(-1, keepdim=True).log_())
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """`g - exp(y) sum(g)`."""
        (result,) = ctx.saved_tensors
        return torch.addcmul(gradients[0], result.exp(), gradients[0].sum(-1, keepdim=True), value=-1)

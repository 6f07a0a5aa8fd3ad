"""Gradients that are added up in float32 and rounded once, where torch's CPU kernels round 16 bits at every addition.

Of 256 equal gradients that are added in bfloat16 one after the other, half are lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onward.lowering.kernels.dtypes import LOW_PRECISION, wide_on_cpus
from onward.lowering.passes import is_plain, is_traced


def rounds_each(*given: Tensor | None) -> bool:
    """Whether torch differentiates them on a CPU in 16 bits, those of the first."""
    tensors = [tensor for tensor in given if tensor is not None]
    if torch.compiler.is_compiling() or is_traced() or tensors[0].dtype not in LOW_PRECISION:
        return False
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return is_trained and all(tensor.is_cpu and is_plain(tensor.detach()) for tensor in tensors)


def with_wide_gradient(function: Callable[[Tensor], Tensor], X: Tensor) -> Tensor:
    """`function(X)` of a linear function that moves or sums numbers and keeps nothing of X for its gradient."""
    if torch.compiler.is_compiling():
        return function(widened_to_compile(X)).to(X.dtype)
    if not rounds_each(X):
        return function(X)
    result: Tensor = _Linear.apply(X, function)  # type: ignore[no-untyped-call]
    return result


def widened_to_compile(X: Tensor) -> Tensor:
    """X, of 16 bits in float32 where code for a CPU is compiled, which keeps 16 bits and joins the conversion.

    What it leaves to torch's kernels, or computes as they do, is rounded as they round it.
    """
    return X.to(wide_on_cpus(X)) if torch.compiler.is_compiling() else X


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Keeps the shape of X."""
        ctx.function, ctx.shape, ctx.dtype = function, X.shape, X.dtype
        return function(X)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Of a linear function at zero, which is its gradient everywhere; linear itself, and differentiable."""
        gradient, differentiable = gradients[0].to(torch.float32), torch.is_grad_enabled()
        with torch.enable_grad():
            zero = gradient.new_zeros(()).expand(ctx.shape).requires_grad_()
            (of_x,) = torch.autograd.grad(ctx.function(zero), zero, gradient, create_graph=differentiable)
        return of_x.to(ctx.dtype), None

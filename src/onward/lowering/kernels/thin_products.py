"""Batches of products in which one matrix is a row or a column: outer products are products of elements.

For many small matrices torch's batched product takes a call for each: an outer product of 16 by 16 takes 10 times as
long as the product of the elements, as the gradient of every product of a matrix and a vector is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from onward.lowering.passes import is_plain

LEAST_ELEMENTS, LARGEST_MATRIX = 2**14, 2**12
"""Of all matrices together, and of one: from 64 x 64 on torch's library is as fast."""


def multiply_thin(A: Tensor, B: Tensor) -> Tensor | None:
    """`A @ B` of A [..., M, K] and B [..., K, N] of the same batch, where M, K or N is 1; None for other products."""
    rank = A.dim()
    # Before sizes are asked for: open ones would be fixed by the answer.
    if rank < 3 or B.dim() != rank or torch.compiler.is_compiling() or not (is_plain(A) and is_plain(B)):
        return None
    if not (A.shape[-1] == 1 or A.shape[-2] == 1 or B.shape[-1] == 1):
        return None
    if A.shape[:-2] != B.shape[:-2] or A.shape[-1] != B.shape[-2] or not _gains(A, B):
        return None
    result: Tensor = _Thin.apply(A, B)  # type: ignore[no-untyped-call]
    return result


def _gains(A: Tensor, B: Tensor) -> bool:
    """Whether there are many small matrices of floats on a CPU, whose product has a gradient that nothing traces."""
    if A.dtype not in (torch.float32, torch.float64) or B.dtype is not A.dtype or not (A.is_cpu and B.is_cpu):
        return False
    rows, inner, columns = A.shape[-2], A.shape[-1], B.shape[-1]
    largest = max(rows * inner, inner * columns, rows * columns)
    if largest >= LARGEST_MATRIX or A.shape[:-2].numel() * largest < LEAST_ELEMENTS or not torch.is_grad_enabled():
        return False
    is_wrapped = is_functorch_wrapped_tensor(A) or is_functorch_wrapped_tensor(B)
    return not (is_wrapped or torch.is_autocast_enabled("cpu"))


def _product(A: Tensor, B: Tensor) -> Tensor:
    return A * B if A.shape[-1] == 1 else torch.matmul(A, B)


class _Thin(torch.autograd.Function):
    """Keeps what the gradient of the other operand needs; its gradients have gradients."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor) -> Tensor:
        """The product."""
        needs_a, needs_b = ctx.needs_input_grad
        ctx.save_for_backward(A if needs_b else None, B if needs_a else None)
        return _product(A, B)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The products of the gradient and the other operand."""
        (G,), (A, B) = gradients, ctx.saved_tensors
        of_a = _product(G, B.mT) if ctx.needs_input_grad[0] else None
        return of_a, _product(A.mT, G) if ctx.needs_input_grad[1] else None

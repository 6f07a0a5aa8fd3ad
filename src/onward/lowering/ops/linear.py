"""Linear algebra: matrix products, Einsum, determinants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onward.lowering.kernels.dtypes import wide_type
from onward.lowering.kernels.matmuls import faster_linear
from onward.lowering.kernels.thin_products import multiply_thin
from onward.lowering.registry import lowers, takes_attributes_of


@lowers("MatMul")
def matmul(A: Tensor, B: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__MatMul.html; numpy's matmul."""
    if A.is_floating_point() or A.is_complex():
        faster = faster_linear(A, B)
        faster = multiply_thin(A, B) if faster is None else faster
        return torch.matmul(A, B) if faster is None else faster
    return integer_matmul(A, B)


def integer_matmul(A: Tensor, B: Tensor) -> Tensor:
    """A matrix product of integers, wrapping around at 64 bits, in the type of A."""
    left, right = A.to(torch.int64), B.to(torch.int64)
    if not A.is_cuda:
        return torch.matmul(left, right).to(A.dtype)
    # cuBLAS knows no integers of this size: multiply and add, element by element.
    row, column = left.dim() == 1, right.dim() == 1
    left = left.unsqueeze(0) if row else left
    right = right.unsqueeze(-1) if column else right
    result = (left.unsqueeze(-1) * right.unsqueeze(-3)).sum(-2)
    result = result.squeeze(-1) if column else result
    return (result.squeeze(-1 if column else -2) if row else result).to(A.dtype)


@lowers("Gemm", since=7)
def gemm(
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Gemm.html; alpha A' B' + beta C, where C broadcasts to the product."""
    if A.dim() != 2 or B.dim() != 2:
        raise ValueError(f"Gemm multiplies matrices; got ranks {A.dim()} and {B.dim()}.")
    left, right = (A.T if transA else A), (B.T if transB else B)
    if not A.is_floating_point():
        product = integer_matmul(left, right)
        total = product * alpha if C is None else product * alpha + C * beta
        return total.to(A.dtype)
    faster = faster_linear(left, right, C) if alpha == beta == 1.0 else None
    if faster is not None:
        return faster
    if C is not None:
        return torch.addmm(C, left, right, beta=beta, alpha=alpha)
    product = torch.mm(left, right)
    return product if alpha == 1.0 else product * alpha


@lowers("Gemm", since=1)
@takes_attributes_of(gemm)
def gemm_1(A: Tensor, B: Tensor, C: Tensor, *, broadcast: int = 0, **attributes: Any) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Gemm.html; up to version 6 C broadcasts only if `broadcast` says so."""
    return gemm(A, B, C, **attributes)


@lowers("Einsum", since=12)
def einsum(*Inputs: Tensor, equation: str) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Einsum.html"""
    result: Tensor = torch.einsum(equation, *Inputs)
    return result


@lowers("Det", since=11)
def det(X: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Det.html; half floats are computed in float32."""
    wide = X.to(wide_type(X.dtype))
    result: Tensor = torch.linalg.det(wide)
    return result.to(X.dtype)

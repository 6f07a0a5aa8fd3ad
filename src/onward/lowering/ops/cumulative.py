"""Running sums and products along one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onward.lowering.kernels.unsigned import unsigned
from onward.lowering.registry import lowers


@lowers("CumSum", since=11, host=("axis",))
@unsigned("wraps")
def cum_sum(x: Tensor, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__CumSum.html"""
    return _accumulate(torch.cumsum, 0, x, axis, exclusive, reverse)


@lowers("CumProd", since=26, host=("axis",))
@unsigned("wraps")
def cum_prod(x: Tensor, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__CumProd.html"""
    return _accumulate(torch.cumprod, 1, x, axis, exclusive, reverse)


def _accumulate(
    accumulate: Callable[..., Tensor], neutral: int, x: Tensor, axis: Any, exclusive: int, reverse: int
) -> Tensor:
    dim = axis[0] if isinstance(axis, tuple) else axis
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"axis {dim} is out of range for a tensor of rank {x.ndim}.")
    if reverse:
        x = x.flip(dim)
    if exclusive and x.shape[dim] > 0:
        first = torch.full_like(x.narrow(dim, 0, 1), neutral)
        x = torch.cat((first, x.narrow(dim, 0, x.shape[dim] - 1)), dim)
    result = accumulate(x, dim, dtype=x.dtype)
    return result.flip(dim) if reverse else result

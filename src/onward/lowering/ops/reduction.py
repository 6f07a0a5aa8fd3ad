"""Reductions along axes: sums, means, extremes, norms, and the positions of extremes.

Up to its own version, each Reduce operator takes the axes as an attribute, from then on as an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onward.lowering.kernels.dtypes import wide_type
from onward.lowering.kernels.unsigned import unsigned
from onward.lowering.registry import lowers

Reduction = Callable[[Tensor, tuple[int, ...], bool], Tensor]
"""Reduces a tensor along axes (none: changes only its elements, as an operator of several parts does), keeping them
as axes of length 1 or not."""


def find_axes(axes: Any, rank: int, noop_with_empty_axes: int) -> tuple[int, ...]:
    """The axes to reduce, from 0 to rank - 1; no axes given mean all of them, or none by the node's choice.

    Raises:
        ValueError: an axis is out of range.
    """
    if axes is None or axes == ():
        return () if noop_with_empty_axes else tuple(range(rank))
    given = axes if isinstance(axes, tuple) else (axes,)
    for axis in given:
        if not -rank <= axis < rank:
            raise ValueError(f"axis {axis} is out of range for a tensor of rank {rank}.")
    return tuple(axis % rank for axis in given)


Form = Callable[..., Tensor]


def _register(op_type: str, input_since: int, reduction: Reduction) -> tuple[Form, Form]:
    """Registers both forms of a Reduce operator; the axes are an input from `input_since` on."""

    @lowers(op_type, since=1)
    def by_attribute(data: Tensor, *, axes: tuple[int, ...] | None = None, keepdims: int = 1) -> Tensor:
        return reduction(data, find_axes(axes, data.ndim, 0), bool(keepdims))

    @lowers(op_type, since=input_since, host=("axes",))
    def by_input(data: Tensor, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        return reduction(data, find_axes(axes, data.ndim, noop_with_empty_axes), bool(keepdims))

    for function, suffix in ((by_attribute, f"_before_{input_since}"), (by_input, "")):
        function.__name__ = function.__qualname__ = f"{reduction.__name__}{suffix}"
        function.__doc__ = f"https://onnx.ai/onnx/operators/onnx__{op_type}.html"
    return by_attribute, by_input


@unsigned("wraps")
def reduce_sum(data: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Sum; of nothing 0."""
    return torch.sum(data, axes, keepdim=keepdims, dtype=data.dtype) if axes else data.clone()


@unsigned("wraps")
def reduce_sum_square(data: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Sum of squares; of nothing 0."""
    return reduce_sum(data * data, axes, keepdims) if axes else data * data


def reduce_mean(data: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Mean; of integers rounded towards zero."""
    if not axes:
        return data.clone()
    if data.dtype.is_floating_point:
        return torch.mean(data, axes, keepdim=keepdims)
    count = math.prod([data.shape[axis] for axis in axes])
    total = torch.sum(data.to(torch.int64), axes, keepdim=keepdims)
    return torch.div(total, count, rounding_mode="trunc").to(data.dtype)


@unsigned("wraps")
def reduce_prod(data: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Product; of nothing 1."""
    if not axes:
        return data.clone()
    kept = [axis for axis in range(data.ndim) if axis not in axes]
    sizes = [data.shape[axis] for axis in kept]
    count = math.prod([data.shape[axis] for axis in axes])
    factors = data.permute(*kept, *axes).reshape(*sizes, count)
    result = torch.prod(factors, -1, dtype=wide_type(data.dtype)).to(data.dtype)
    return result.reshape([1 if i in axes else n for i, n in enumerate(data.shape)]) if keepdims else result


@unsigned("orders")
def reduce_max(data: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Maximum; equal elements share the gradient; of nothing the least value of the type."""
    return _extreme(torch.amax, data, axes, keepdims, largest=False)


@unsigned("orders")
def reduce_min(data: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Minimum; equal elements share the gradient; of nothing the greatest value of the type."""
    return _extreme(torch.amin, data, axes, keepdims, largest=True)


def _extreme(
    extreme: Callable[..., Tensor], data: Tensor, axes: tuple[int, ...], keepdims: bool, largest: bool
) -> Tensor:
    if not axes:
        return data.clone()
    if any(data.shape[axis] == 0 for axis in axes):
        return data.new_full(_reduced_shape(data, axes, keepdims), _limit(data.dtype, largest))
    return extreme(data, axes, keepdim=keepdims)


def _limit(dtype: torch.dtype, largest: bool) -> float | int | bool:
    """The greatest or least value of a type, infinity included."""
    if dtype is torch.bool:
        return largest
    if dtype.is_floating_point:
        return math.inf if largest else -math.inf
    info = torch.iinfo(dtype)
    return info.max if largest else info.min


def _reduced_shape(data: Tensor, axes: tuple[int, ...], keepdims: bool) -> list[int]:
    if keepdims:
        return [1 if axis in axes else size for axis, size in enumerate(data.shape)]
    return [size for axis, size in enumerate(data.shape) if axis not in axes]


@unsigned("wraps")
def reduce_l1(data: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Sum of absolute values; of nothing 0."""
    return reduce_sum(torch.abs(data), axes, keepdims)


def reduce_l2(data: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Square root of the sum of squares; its gradient at 0 is 0; of nothing 0."""
    if not data.dtype.is_floating_point:
        return reduce_l2(data.to(torch.float64), axes, keepdims).to(data.dtype)
    return torch.linalg.vector_norm(data, 2, axes, keepdim=keepdims) if axes else torch.abs(data)


def reduce_log_sum(data: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Logarithm of the sum; of nothing minus infinity."""
    if not data.dtype.is_floating_point:
        return reduce_log_sum(data.to(torch.float64), axes, keepdims).to(data.dtype)
    return torch.log(reduce_sum(data, axes, keepdims))


def reduce_log_sum_exp(data: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Logarithm of the sum of exponentials, without overflow; of nothing minus infinity."""
    if not data.dtype.is_floating_point:
        return reduce_log_sum_exp(data.to(torch.float64), axes, keepdims).to(data.dtype)
    return torch.logsumexp(data, axes, keepdim=keepdims) if axes else data.clone()


FORMS: Mapping[str, tuple[Form, Form]] = {
    op_type: _register(op_type, input_since, reduction)
    for op_type, input_since, reduction in (
        ("ReduceSum", 13, reduce_sum),
        ("ReduceSumSquare", 18, reduce_sum_square),
        ("ReduceMean", 18, reduce_mean),
        ("ReduceProd", 18, reduce_prod),
        ("ReduceMax", 18, reduce_max),
        ("ReduceMin", 18, reduce_min),
        ("ReduceL1", 18, reduce_l1),
        ("ReduceL2", 18, reduce_l2),
        ("ReduceLogSum", 18, reduce_log_sum),
        ("ReduceLogSumExp", 18, reduce_log_sum_exp),
    )
}
"""What lowers each operator: with axes as an attribute, and as an input."""


@lowers("ArgMax", since=1)
@unsigned("compares")
def arg_max(data: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__ArgMax.html"""
    return _position(torch.argmax, data, axis, keepdims, select_last_index)


@lowers("ArgMin", since=1)
@unsigned("compares")
def arg_min(data: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__ArgMin.html"""
    return _position(torch.argmin, data, axis, keepdims, select_last_index)


def _position(find: Callable[..., Tensor], data: Tensor, axis: int, keepdims: int, last: int) -> Tensor:
    if not -data.ndim <= axis < data.ndim:
        raise ValueError(f"axis {axis} is out of range for a tensor of rank {data.ndim}.")
    if not last:
        return find(data, axis, keepdim=bool(keepdims))
    return data.shape[axis] - 1 - find(data.flip(axis), axis, keepdim=bool(keepdims))

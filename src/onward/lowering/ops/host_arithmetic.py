"""Arithmetic, comparisons, casts and reductions on Python values: the part of a model that computes shapes.

The numbers may be torch SymInts and SymFloats. Concrete floats are rounded to their ONNX type after every step, so
that sizes derived from them come out as any runtime computes them.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from onward.lowering.kernels.dtypes import torch_dtype
from onward.lowering.kernels.host import HostValue, flatten, host_shape, map_broadcast, unflatten
from onward.lowering.ops.reduction import find_axes
from onward.lowering.registry import lowers_on_host

Dtypes = tuple[torch.dtype | None, ...]

_ROUNDED: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
}


# torch's conversions and extremes take numbers and symbols alike, and never decide on a symbol's value.
_to_int: Callable[[Any], Any] = torch.sym_int
_to_float: Callable[[Any], Any] = torch.sym_float
_maximum: Callable[[Any, Any], Any] = torch.sym_max
_minimum: Callable[[Any, Any], Any] = torch.sym_min


def _stored(number: Any, dtype: torch.dtype | None) -> Any:
    """A concrete number as its type holds it: floats rounded, integers without the bits that do not fit."""
    if torch.compiler.is_compiling() or dtype is None:
        return number
    if type(number) is int and dtype.is_floating_point:
        number = float(number)
    if isinstance(number, float) and dtype in _ROUNDED:
        with np.errstate(over="ignore"):
            return float(_ROUNDED[dtype](number))
    if type(number) is int and not dtype.is_floating_point and dtype is not torch.bool:
        info = torch.iinfo(dtype)
        return (number - info.min) % (info.max - info.min + 1) + info.min
    return number


def _apply(function: Callable[..., Any], dtype: torch.dtype | None, *values: HostValue) -> HostValue:
    return map_broadcast(lambda *numbers: _stored(function(*numbers), dtype), *values)


@lowers_on_host("Add", since=7)
def add(A: HostValue, B: HostValue, *, dtypes: Dtypes) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Add.html"""
    return _apply(operator.add, dtypes[0], A, B)


@lowers_on_host("Sub", since=7)
def sub(A: HostValue, B: HostValue, *, dtypes: Dtypes) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Sub.html"""
    return _apply(operator.sub, dtypes[0], A, B)


@lowers_on_host("Mul", since=7)
def mul(A: HostValue, B: HostValue, *, dtypes: Dtypes) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Mul.html"""
    return _apply(operator.mul, dtypes[0], A, B)


@lowers_on_host("Div", since=7)
def div(A: HostValue, B: HostValue, *, dtypes: Dtypes) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Div.html; quotients of integers are rounded towards zero."""
    return _apply(_divide, dtypes[0], A, B)


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, float | torch.SymFloat):
        if isinstance(b, float) and b == 0:
            return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)
        return a / b
    if b == 0:
        raise ValueError(f"{a} is divided by zero.")
    return a // b if (a >= 0) == (b > 0) else -(-a // b)


@lowers_on_host("Mod", since=10)
def mod(A: HostValue, B: HostValue, *, fmod: int = 0, dtypes: Dtypes) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Mod.html"""
    return _apply(_truncated_remainder if fmod else operator.mod, dtypes[0], A, B)


def _truncated_remainder(a: Any, b: Any) -> Any:
    return math.fmod(a, b) if isinstance(a, float) else a - b * _divide(a, b)


@lowers_on_host("Pow", since=7)
def pow_(X: HostValue, Y: HostValue, *, dtypes: Dtypes) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Pow.html; the result has the type of the base."""
    integer = dtypes[0] is not None and not dtypes[0].is_floating_point
    return _apply(lambda x, y: _to_int(x**y) if integer else x**y, dtypes[0], X, Y)


@lowers_on_host("Max", since=8)
def max_(*data_0: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Max.html"""
    return map_broadcast(lambda *numbers: reduce(_maximum, numbers), *data_0)


@lowers_on_host("Min", since=8)
def min_(*data_0: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Min.html"""
    return map_broadcast(lambda *numbers: reduce(_minimum, numbers), *data_0)


@lowers_on_host("Neg", since=6)
def neg(X: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Neg.html"""
    return map_broadcast(operator.neg, X)


@lowers_on_host("Abs", since=6)
def abs_(X: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Abs.html"""
    return map_broadcast(abs, X)


@lowers_on_host("Sign", since=9)
def sign(input: HostValue, *, dtypes: Dtypes) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Sign.html"""
    return _apply(lambda x: (x > 0) - (x < 0), dtypes[0], input)


@lowers_on_host("Floor", since=6)
def floor(X: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Floor.html"""
    return map_broadcast(lambda x: _to_float(math.floor(x)), X)


@lowers_on_host("Ceil", since=6)
def ceil(X: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Ceil.html"""
    return map_broadcast(lambda x: _to_float(math.ceil(x)), X)


@lowers_on_host("Round", since=11)
def round_(X: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Round.html; halves to the even neighbor."""
    return map_broadcast(lambda x: _to_float(round(x)), X)


@lowers_on_host("Sqrt", since=6)
def sqrt(X: HostValue, *, dtypes: Dtypes) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Sqrt.html"""
    return _apply(torch.sym_sqrt, dtypes[0], X)


@lowers_on_host("Reciprocal", since=6)
def reciprocal(X: HostValue, *, dtypes: Dtypes) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Reciprocal.html"""
    return _apply(lambda x: _divide(1.0, x), dtypes[0], X)


@lowers_on_host("Clip", since=11)
def clip(input: HostValue, min: HostValue | None = None, max: HostValue | None = None) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Clip.html; where `min` > `max`, everything becomes `max`."""
    if min is not None:
        input = max_(input, flatten(min)[0])
    return input if max is None else min_(input, flatten(max)[0])


@lowers_on_host("Equal", since=7, result_dtype="bool")
def equal(A: HostValue, B: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Equal.html"""
    return map_broadcast(operator.eq, A, B)


@lowers_on_host("Greater", since=7, result_dtype="bool")
def greater(A: HostValue, B: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Greater.html"""
    return map_broadcast(operator.gt, A, B)


@lowers_on_host("GreaterOrEqual", since=12, result_dtype="bool")
def greater_or_equal(A: HostValue, B: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__GreaterOrEqual.html"""
    return map_broadcast(operator.ge, A, B)


@lowers_on_host("Less", since=7, result_dtype="bool")
def less(A: HostValue, B: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Less.html"""
    return map_broadcast(operator.lt, A, B)


@lowers_on_host("LessOrEqual", since=12, result_dtype="bool")
def less_or_equal(A: HostValue, B: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__LessOrEqual.html"""
    return map_broadcast(operator.le, A, B)


@lowers_on_host("Not")
def not_(X: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Not.html"""
    return map_broadcast(operator.not_, X)


@lowers_on_host("And", since=7)
def and_(A: HostValue, B: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__And.html"""
    return map_broadcast(lambda a, b: a and b, A, B)


@lowers_on_host("Or", since=7)
def or_(A: HostValue, B: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Or.html"""
    return map_broadcast(lambda a, b: a or b, A, B)


@lowers_on_host("Xor", since=7)
def xor(A: HostValue, B: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Xor.html"""
    return map_broadcast(operator.ne, A, B)


@lowers_on_host("Where", since=9, result_dtype="second")
def where(condition: HostValue, X: HostValue, Y: HostValue) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Where.html"""
    return map_broadcast(lambda c, x, y: x if c else y, condition, X, Y)


@lowers_on_host("Cast", since=6, result_dtype="to")
def cast(input: HostValue, *, round_mode: str = "up", saturate: int = 1, to: int) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Cast.html"""
    dtype = torch_dtype(ir.DataType(to), "attribute 'to'")
    return map_broadcast(lambda number: _converted(number, dtype), input)


@lowers_on_host("CastLike", since=15, result_dtype="second")
def cast_like(
    input: HostValue, target_type: HostValue, *, round_mode: str = "up", saturate: int = 1, dtypes: Dtypes
) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__CastLike.html"""
    dtype = dtypes[1]
    assert dtype is not None
    return map_broadcast(lambda number: _converted(number, dtype), input)


def _converted(number: Any, dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return number != 0
    if isinstance(number, bool | torch.SymBool):
        number = 1 if number else 0
    return _stored(_to_float(number) if dtype.is_floating_point else _to_int(number), dtype)


def _reduce(
    combine: Callable[[list[Any]], Any], data: HostValue, axes: Any, keepdims: int, noop_with_empty_axes: int
) -> HostValue:
    shape = host_shape(data)
    reduced = find_axes(axes, len(shape), noop_with_empty_axes)
    if not reduced and shape:
        return data
    numbers = dict(zip(itertools.product(*map(range, shape)), flatten(data), strict=True))
    kept = [[0] if axis in reduced else range(size) for axis, size in enumerate(shape)]
    spans = [range(size) if axis in reduced else [0] for axis, size in enumerate(shape)]
    results = [
        combine([numbers[tuple(map(sum, zip(start, step, strict=True)))] for step in itertools.product(*spans)])
        for start in itertools.product(*kept)
    ]
    sizes = [1 if axis in reduced else size for axis, size in enumerate(shape) if keepdims or axis not in reduced]
    return unflatten(results, tuple(sizes))


def _register_reduction(op_type: str, input_since: int, combine: Callable[[list[Any]], Any]) -> None:
    @lowers_on_host(op_type)
    def by_attribute(
        data: HostValue, *, axes: tuple[int, ...] | None = None, keepdims: int = 1, dtypes: Dtypes
    ) -> HostValue:
        return _reduce(lambda numbers: _stored(combine(numbers), dtypes[0]), data, axes, keepdims, 0)

    @lowers_on_host(op_type, since=input_since)
    def by_input(
        data: HostValue, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0, dtypes: Dtypes
    ) -> HostValue:
        return _reduce(lambda numbers: _stored(combine(numbers), dtypes[0]), data, axes, keepdims, noop_with_empty_axes)

    for function, suffix in ((by_attribute, f"_before_{input_since}"), (by_input, "")):
        function.__name__ = function.__qualname__ = f"{op_type.lower()}{suffix}"
        function.__doc__ = f"https://onnx.ai/onnx/operators/onnx__{op_type}.html"


_register_reduction("ReduceSum", 13, sum)
_register_reduction("ReduceProd", 18, lambda numbers: reduce(operator.mul, numbers, 1))
_register_reduction("ReduceMax", 18, lambda numbers: reduce(_maximum, numbers))
_register_reduction("ReduceMin", 18, lambda numbers: reduce(_minimum, numbers))

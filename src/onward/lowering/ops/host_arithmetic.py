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


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, float | torch.SymFloat):
        if isinstance(b, float) and b == 0:
            return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)
        return a / b
    if b == 0:
        raise ValueError(f"{a} is divided by zero.")
    return a // b if (a >= 0) == (b > 0) else -(-a // b)


def _rounded(function: Callable[..., Any]) -> Callable[..., HostValue]:
    """A function of numbers on values, whose results have the type of the first."""

    def call(*values: HostValue, dtypes: Dtypes) -> HostValue:
        return map_broadcast(lambda *numbers: _stored(function(*numbers), dtypes[0]), *values)

    return call


def _broadcast(function: Callable[..., Any]) -> Callable[..., HostValue]:
    """A function of numbers on values, its results as they are."""

    def call(*values: HostValue) -> HostValue:
        return map_broadcast(function, *values)

    return call


_ROUNDED_ARITHMETIC: tuple[tuple[str, int, Callable[..., Any]], ...] = (
    ("Add", 7, operator.add),
    ("Sub", 7, operator.sub),
    ("Mul", 7, operator.mul),
    ("Div", 7, _divide),
    ("Sign", 9, lambda x: (x > 0) - (x < 0)),
    ("Sqrt", 6, torch.sym_sqrt),
    ("Reciprocal", 6, lambda x: _divide(1.0, x)),
)
_ARITHMETIC: tuple[tuple[str, int, Callable[..., Any]], ...] = (
    ("Max", 8, lambda *numbers: reduce(_maximum, numbers)),
    ("Min", 8, lambda *numbers: reduce(_minimum, numbers)),
    ("Neg", 6, operator.neg),
    ("Abs", 6, abs),
    ("Floor", 6, lambda x: _to_float(math.floor(x))),
    ("Ceil", 6, lambda x: _to_float(math.ceil(x))),
    ("Round", 11, lambda x: _to_float(round(x))),  # halves to the even neighbor
    ("Not", 1, operator.not_),
    ("And", 7, lambda a, b: a and b),
    ("Or", 7, lambda a, b: a or b),
    ("Xor", 7, operator.ne),
)
_COMPARISONS: tuple[tuple[str, int, Callable[..., Any]], ...] = (
    ("Equal", 7, operator.eq),
    ("Greater", 7, operator.gt),
    ("GreaterOrEqual", 12, operator.ge),
    ("Less", 7, operator.lt),
    ("LessOrEqual", 12, operator.le),
)
for _op_type, _since, _function in _ROUNDED_ARITHMETIC:
    lowers_on_host(_op_type, since=_since)(_rounded(_function))
for _op_type, _since, _function in _ARITHMETIC:
    lowers_on_host(_op_type, since=_since)(_broadcast(_function))
for _op_type, _since, _function in _COMPARISONS:
    lowers_on_host(_op_type, since=_since, result_dtype="bool")(_broadcast(_function))
lowers_on_host("Where", since=9, result_dtype="second")(_broadcast(lambda c, x, y: x if c else y))


@lowers_on_host("Mod", since=10)
def mod(A: HostValue, B: HostValue, *, fmod: int = 0, dtypes: Dtypes) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Mod.html"""

    def truncated(a: Any, b: Any) -> Any:
        return math.fmod(a, b) if isinstance(a, float) else a - b * _divide(a, b)

    return _rounded(truncated if fmod else operator.mod)(A, B, dtypes=dtypes)


@lowers_on_host("Pow", since=7)
def pow_(X: HostValue, Y: HostValue, *, dtypes: Dtypes) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Pow.html; the result has the type of the base."""
    integer = dtypes[0] is not None and not dtypes[0].is_floating_point
    return _rounded(lambda x, y: _to_int(x**y) if integer else x**y)(X, Y, dtypes=dtypes)


@lowers_on_host("Clip", since=11)
def clip(input: HostValue, min: HostValue | None = None, max: HostValue | None = None) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Clip.html; where `min` > `max`, everything becomes `max`."""
    if min is not None:
        input = map_broadcast(_maximum, input, flatten(min)[0])
    return input if max is None else map_broadcast(_minimum, input, flatten(max)[0])


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

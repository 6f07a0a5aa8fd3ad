"""Arithmetic, element by element, with broadcasting: sums, products, quotients, powers, rounding, bounds.

Operands that the program knows as numbers arrive as numbers (`onward.lowering.kernels.operands`).
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from onward.lowering.kernels.bounds import clamp
from onward.lowering.kernels.layout import with_gradient_alike
from onward.lowering.kernels.operands import align, broadcasts_by_attribute, operand_for, takes_numbers
from onward.lowering.kernels.rematerialize import activated, summed
from onward.lowering.kernels.unsigned import UNSIGNED, divide_unsigned, narrow_ordered, unsigned, widen, widen_ordered
from onward.lowering.passes import is_traced
from onward.lowering.registry import lowers


@lowers("Add", since=7, either=("A", "B"))
@takes_numbers
@unsigned("wraps")
def add(A: Any, B: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__Add.html"""
    return summed(A, B)


@lowers("Sub", since=7, either=("A", "B"))
@takes_numbers
@unsigned("wraps")
def sub(A: Any, B: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__Sub.html"""
    return A - B


@lowers("Mul", since=7, either=("A", "B"))
@takes_numbers
@unsigned("wraps")
def mul(A: Any, B: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__Mul.html"""
    return A * B


def quotient(A: Any, B: Any) -> Tensor:
    """Rounded once, of numbers as well: torch divides those by multiplying with the reciprocal."""
    return torch.true_divide(A if isinstance(A, Tensor) else torch.full((), A, dtype=B.dtype, device=B.device), B)


@lowers("Div", since=7, either=("A", "B"))
@takes_numbers
def div(A: Any, B: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__Div.html; quotients of integers are rounded towards zero."""
    dtype = A.dtype if isinstance(A, Tensor) else B.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return quotient(A, B)
    if dtype is torch.uint64:
        return divide_unsigned(_bits(A, B), _bits(B, A)).to(dtype)
    if dtype in UNSIGNED:
        return torch.div(_bits(A, B), _bits(B, A), rounding_mode="trunc").to(dtype)
    if not isinstance(A, Tensor):
        A = torch.full_like(B, A)
    return torch.div(A, B, rounding_mode="trunc")


def _bits(value: Any, other: Any) -> Tensor:
    """An unsigned operand as int64 with the same bits."""
    if isinstance(value, Tensor):
        return widen(value)
    return torch.full((), value - 2**64 if value >= 2**63 else value, dtype=torch.int64, device=other.device)


@lowers("Mod", since=10)
def mod(A: Tensor, B: Tensor, *, fmod: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Mod.html; the quotient is rounded down, with `fmod` towards zero."""
    if A.dtype is torch.uint64:
        dividend, divisor = widen(A), widen(B)
        return (dividend - divide_unsigned(dividend, divisor) * divisor).to(A.dtype)
    remainder = torch.fmod if fmod else torch.remainder
    return remainder(widen(A), widen(B)).to(A.dtype)


@lowers("Pow", since=7, either=("Y",))
def pow_(X: Tensor, Y: Any, *, dtypes: tuple[torch.dtype | None, ...]) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Pow.html; the result has the type of the base."""
    exponent = Y if isinstance(Y, Tensor) else operand_for(Y, X, dtypes[1])
    if isinstance(exponent, Tensor):
        exponent = widen(exponent)
        if X.dtype.is_floating_point and not exponent.dtype.is_floating_point:
            return torch.pow(X, exponent)
        fractional = exponent.dtype.is_floating_point
    else:
        fractional = isinstance(exponent, float)
        if fractional and exponent.is_integer():
            exponent, fractional = int(exponent), exponent < 0
    if not X.dtype.is_floating_point and fractional:
        return torch.pow(X.to(torch.float64), exponent).to(X.dtype)
    if not X.dtype.is_floating_point and not isinstance(exponent, Tensor) and exponent < 0:
        exponent = torch.full_like(X, exponent)
    return torch.pow(X, exponent).to(X.dtype)


@lowers("Pow", since=1)
def pow_before_7(X: Tensor, Y: Tensor, *, axis: int | None = None, broadcast: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Pow.html; broadcasting by attribute."""
    return torch.pow(X, align(X, Y, axis, broadcast))


for _op_type, _function in (("Add", add), ("Sub", sub), ("Mul", mul), ("Div", div)):
    lowers(_op_type, since=1)(broadcasts_by_attribute(_function))


@lowers("Sum", since=1)
def sum_(*data_0: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Sum.html"""
    return reduce(torch.add, data_0)


@lowers("Mean", since=1)
def mean(*data_0: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Mean.html"""
    return reduce(torch.add, data_0) / len(data_0) if len(data_0) > 1 else data_0[0]


@lowers("Max", since=1)
@unsigned("orders")
def max_(*data_0: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Max.html; equal elements share the gradient, a bound takes none of it."""
    return data_0[0] if len(data_0) == 1 else reduce(_larger, data_0)


def _larger(a: Tensor, b: Tensor) -> Tensor:
    if _is_bound(b, a):
        return _clamp(a, _number_if_at_hand(b), None)
    return torch.maximum(a, b)


@lowers("Min", since=1)
@unsigned("orders")
def min_(*data_0: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Min.html; equal elements share the gradient, a bound takes none of it."""
    return data_0[0] if len(data_0) == 1 else reduce(_smaller, data_0)


def _smaller(a: Tensor, b: Tensor) -> Tensor:
    if _is_bound(b, a):
        return _clamp(a, None, _number_if_at_hand(b))
    return torch.minimum(a, b)


def _is_bound(number: Tensor, x: Tensor) -> bool:
    """Whether a number without a gradient bounds a tensor with one: torch exports `clamp(x, min=number)` so."""
    is_number = number.dim() == 0 and not number.requires_grad and x.requires_grad and x.dim() > 0
    return is_number and number.dtype is x.dtype


def _number_if_at_hand(bound: Tensor) -> Any:
    """The number of a tensor, where reading it waits for no device and nothing traces it."""
    is_read = type(bound) is Tensor and bound.is_cpu and not (torch.compiler.is_compiling() or is_traced())
    return bound.item() if is_read and not is_functorch_wrapped_tensor(bound) else bound


@lowers("Clip", since=11, either=("min", "max"))
def clip(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Clip.html; where `min` > `max`, everything becomes `max`."""
    low, high = _scalar(min), _scalar(max)
    if input.dtype in UNSIGNED:
        bounds = [None if b is None else widen_ordered(torch.as_tensor(b, dtype=input.dtype)) for b in (low, high)]
        bounds = [None if b is None else b.to(input.device) for b in bounds]
        return narrow_ordered(_clamp(widen_ordered(input), *bounds), input.dtype)
    return _clamp(input, low, high)


def _scalar(bound: Any) -> Any:
    """A bound of one element, written as a scalar or (against the text, but found) as a one-element tensor."""
    if isinstance(bound, Tensor):
        if bound.numel() != 1:
            raise ValueError(f"a bound must be a scalar; it has {bound.numel()} elements.")
        return bound.reshape(())
    while isinstance(bound, tuple):
        if len(bound) != 1:
            raise ValueError(f"a bound must be a scalar; it has {len(bound)} elements.")
        bound = bound[0]
    return bound


def _clamp(x: Tensor, low: Any, high: Any) -> Tensor:
    if low is None and high is None:
        return x.clone()
    if low is not None and high is not None and isinstance(low, Tensor) != isinstance(high, Tensor):
        return torch.clamp(torch.clamp(x, min=low), max=high)
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.clamp(x, low, high)
    clamped = activated(x, lambda t: clamp(t, low, high), lambda t: torch.clamp_(t, low, high))
    return with_gradient_alike(clamped)


_FLOAT_MAX = 3.4028234663852886e38


@lowers("Clip", since=6)
def clip_before_11(input: Tensor, *, max: float = _FLOAT_MAX, min: float = -_FLOAT_MAX) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Clip.html; the bounds are attributes."""
    largest = torch.finfo(input.dtype).max
    low, high = (None if abs(bound) > largest else bound for bound in (min, max))
    return _clamp(input, low, high)


for _op_type, _name in (
    ("Exp", "input"),
    ("Log", "input"),
    ("Ceil", "X"),
    ("Floor", "X"),
    ("Neg", "X"),
    ("Reciprocal", "X"),
    ("Sqrt", "X"),
):
    lowers(_op_type, since=1, inputs=(_name,))(getattr(torch, _op_type.lower()))
lowers("Round", since=11, inputs=("X",))(torch.round)  # halves to the even neighbor


@lowers("Clip", since=1)
def clip_before_6(input: Tensor, *, max: float | None = None, min: float | None = None) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Clip.html; the bounds are attributes, an absent one does not bound."""
    return _clamp(input, min, max)


@lowers("Abs", since=1)
def abs_(X: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Abs.html; the gradient at 0 is 0."""
    return X.clone() if X.dtype in UNSIGNED else torch.abs(X)


@lowers("Sign", since=9)
def sign(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Sign.html"""
    return (input != 0).to(input.dtype) if input.dtype in UNSIGNED else torch.sign(input)


@lowers("Erf", since=9)
def erf(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Erf.html; of integers, the integer part."""
    if input.dtype.is_floating_point:
        return torch.erf(input)
    return torch.erf(input.to(torch.float64)).to(input.dtype)

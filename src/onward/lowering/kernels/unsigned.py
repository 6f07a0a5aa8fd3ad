"""Unsigned integers of 16, 32 and 64 bits, which torch stores but hardly computes with.

They are computed in int64 and cast back. Conversions between uint64 and int64 keep the bits, so sums, differences
and products are exact modulo 2**64; where order matters, a uint64 is shifted by 2**63 into int64's range first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Types that torch stores but hardly computes with."""

_SIGN_BIT = -(2**63)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def widen(x: Tensor) -> Tensor:
    """int64 with the value of an unsigned integer (of a uint64: with its bits); other types as they are."""
    return x.to(torch.int64) if x.dtype in UNSIGNED else x


def widen_ordered(x: Tensor) -> Tensor:
    """int64 with the order of an unsigned integer; other types as they are."""
    if x.dtype is torch.uint64:
        return x.to(torch.int64) ^ _SIGN_BIT
    return widen(x)


def narrow_ordered(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that `widen_ordered` made into int64, in their own type again."""
    return (x ^ _SIGN_BIT).to(dtype) if dtype is torch.uint64 else x.to(dtype)


def unsigned(meaning: Literal["wraps", "orders", "compares"]) -> Callable[[_Function], _Function]:
    """Lets a function of tensors of one type also take uint16, uint32 and uint64.

    "wraps": its result is right modulo 2**64; "orders": it depends on order only and gives back some of its
    inputs' values; "compares": it depends on order only and gives booleans or indices.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*inputs: Any, **keywords: Any) -> Any:
            dtype = None
            for value in inputs:
                if isinstance(value, Tensor):
                    dtype = value.dtype
                    break
            if dtype is None or dtype not in UNSIGNED:
                return function(*inputs, **keywords)
            convert = widen if meaning == "wraps" else widen_ordered
            result = function(*(_converted(x, dtype, convert) for x in inputs), **keywords)
            if meaning == "compares":
                return result
            return result.to(dtype) if meaning == "wraps" else narrow_ordered(result, dtype)

        call.__module__ = __name__  # generated code would call a function by torch's name for it, and not this one
        return cast(_Function, call)

    return decorate


def _converted(value: Any, dtype: torch.dtype, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return convert(value) if value.dtype in UNSIGNED else value
    if dtype is not torch.uint64 or not isinstance(value, int) or isinstance(value, bool):
        return value
    if convert is widen_ordered:
        return value + _SIGN_BIT
    return value - 2**64 if value >= 2**63 else value


def divide_unsigned(a: Tensor, b: Tensor) -> Tensor:
    """Quotients of uint64 numbers given by their bits in int64, rounded down.

    Warren, Hacker's Delight, 9-3: halve the dividend, divide, double, and correct by at most one.
    """
    estimate = torch.div((a >> 1) & ~_SIGN_BIT, torch.where(b < 0, 1, b), rounding_mode="trunc") << 1
    remainder = a - estimate * b
    quotient = estimate + ((remainder ^ _SIGN_BIT) >= (b ^ _SIGN_BIT)).to(torch.int64)
    return torch.where(b < 0, ((a ^ _SIGN_BIT) >= (b ^ _SIGN_BIT)).to(torch.int64), quotient)

"""Comparisons, logic on booleans, and choosing by a condition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onward.lowering.kernels.operands import broadcasts_by_attribute, takes_numbers
from onward.lowering.kernels.unsigned import UNSIGNED, unsigned, widen
from onward.lowering.registry import lowers


@lowers("Equal", since=7, either=("A", "B"))
@takes_numbers
@unsigned("compares")
def equal(A: Any, B: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__Equal.html"""
    return A == B


@lowers("Greater", since=7, either=("A", "B"))
@takes_numbers
@unsigned("compares")
def greater(A: Any, B: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__Greater.html"""
    return A > B


@lowers("GreaterOrEqual", since=12, either=("A", "B"))
@takes_numbers
@unsigned("compares")
def greater_or_equal(A: Any, B: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__GreaterOrEqual.html"""
    return A >= B


@lowers("Less", since=7, either=("A", "B"))
@takes_numbers
@unsigned("compares")
def less(A: Any, B: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__Less.html"""
    return A < B


@lowers("LessOrEqual", since=12, either=("A", "B"))
@takes_numbers
@unsigned("compares")
def less_or_equal(A: Any, B: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__LessOrEqual.html"""
    return A <= B


@lowers("And", since=7)
def and_(A: Tensor, B: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__And.html"""
    return torch.logical_and(A, B)


@lowers("Or", since=7)
def or_(A: Tensor, B: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Or.html"""
    return torch.logical_or(A, B)


@lowers("Xor", since=7)
def xor(A: Tensor, B: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Xor.html"""
    return torch.logical_xor(A, B)


_ONCE_BROADCAST_BY_ATTRIBUTE: dict[str, Callable[..., Any]] = {
    "Equal": equal, "Greater": greater, "Less": less, "And": and_, "Or": or_, "Xor": xor
}  # fmt: skip
for _op_type, _function in _ONCE_BROADCAST_BY_ATTRIBUTE.items():
    lowers(_op_type, since=1)(broadcasts_by_attribute(_function, consumes=False))


@lowers("Not", since=1)
def not_(X: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Not.html"""
    return torch.logical_not(X)


@lowers("Where", since=9)
def where(condition: Tensor, X: Tensor, Y: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Where.html"""
    # torch 2.11 chooses between no unsigned integers but bytes.
    chosen = torch.where(condition, widen(X), widen(Y))
    return chosen.to(X.dtype) if X.dtype in UNSIGNED else chosen


@lowers("IsNaN", since=9)
def is_nan(X: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__IsNaN.html"""
    return torch.isnan(_comparable(X))


@lowers("IsInf", since=10)
def is_inf(X: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__IsInf.html"""
    if detect_negative and detect_positive:
        return torch.isinf(_comparable(X))
    if detect_negative:
        return torch.isneginf(_comparable(X))
    if detect_positive:
        return torch.isposinf(_comparable(X))
    return torch.zeros_like(X, dtype=torch.bool)


def _comparable(x: Tensor) -> Tensor:
    """float8 in float32, which has all of its values and, unlike it, comparisons."""
    return x.to(torch.float32) if x.dtype.itemsize == 1 else x

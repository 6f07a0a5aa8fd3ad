"""Comparisons, logic on booleans, and choosing by a condition."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onward.lowering.kernels.operands import broadcasts_by_attribute, takes_numbers
from onward.lowering.kernels.unsigned import UNSIGNED, unsigned, widen
from onward.lowering.registry import lowers


def _compares(op_type: str, since: int, compare: Callable[[Any, Any], Any]) -> None:
    @takes_numbers
    @unsigned("compares")
    def call(A: Any, B: Any) -> Any:
        return compare(A, B)

    lowers(op_type, since=since, either=("A", "B"))(call)
    if since == 7:
        lowers(op_type, since=1)(broadcasts_by_attribute(call))


_compares("Equal", 7, operator.eq)
_compares("Greater", 7, operator.gt)
_compares("GreaterOrEqual", 12, operator.ge)
_compares("Less", 7, operator.lt)
_compares("LessOrEqual", 12, operator.le)
for _op_type, _function in (("And", torch.logical_and), ("Or", torch.logical_or), ("Xor", torch.logical_xor)):
    lowers(_op_type, since=7, inputs=("A", "B"))(_function)
    lowers(_op_type, since=1)(broadcasts_by_attribute(_function))
lowers("Not", since=1, inputs=("X",))(torch.logical_not)


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

"""Softmax, its logarithm, and Hardmax. Before opset 13 they flatten the input to a matrix at `axis` first."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from onward.lowering.kernels import short_rows
from onward.lowering.registry import lowers


@lowers("Softmax", since=13)
def softmax(input: Tensor, *, axis: int = -1) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Softmax.html"""
    return short_rows.softmax(input, axis)


@lowers("LogSoftmax", since=13)
def log_softmax(input: Tensor, *, axis: int = -1) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__LogSoftmax.html"""
    return short_rows.log_softmax(input, axis)


@lowers("Hardmax", since=13)
def hardmax(input: Tensor, *, axis: int = -1) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Hardmax.html; 1 at the first maximum, 0 elsewhere."""
    return torch.zeros_like(input).scatter(axis, input.argmax(axis, keepdim=True), 1)


@lowers("Softmax", since=1)
def softmax_before_13(input: Tensor, *, axis: int = 1) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Softmax.html; over all axes from `axis` on together."""
    return _on_matrix(softmax, input, axis)


@lowers("LogSoftmax", since=1)
def log_softmax_before_13(input: Tensor, *, axis: int = 1) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__LogSoftmax.html; over all axes from `axis` on together."""
    return _on_matrix(log_softmax, input, axis)


@lowers("Hardmax", since=1)
def hardmax_before_13(input: Tensor, *, axis: int = 1) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Hardmax.html; over all axes from `axis` on together."""
    return _on_matrix(hardmax, input, axis)


def _on_matrix(function: Callable[[Tensor], Tensor], x: Tensor, axis: int) -> Tensor:
    """Applies a function along the rows of the matrix [product of the axes before `axis`, product of the others]."""
    if not -x.ndim <= axis <= x.ndim:
        raise ValueError(f"axis {axis} is out of range for a tensor of rank {x.ndim}.")
    start = axis + x.ndim if axis < 0 else axis
    if start == x.ndim - 1:
        return function(x)
    return function(x.reshape(*x.shape[:start], math.prod(x.shape[start:]))).reshape(x.shape)

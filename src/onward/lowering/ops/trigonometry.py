"""Trigonometric and hyperbolic functions and their inverses, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from onward.lowering.registry import lowers


@lowers("Sin", since=7)
def sin(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Sin.html"""
    return torch.sin(input)


@lowers("Cos", since=7)
def cos(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Cos.html"""
    return torch.cos(input)


@lowers("Tan", since=7)
def tan(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Tan.html"""
    return torch.tan(input)


@lowers("Asin", since=7)
def asin(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Asin.html"""
    return torch.asin(input)


@lowers("Acos", since=7)
def acos(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Acos.html"""
    return torch.acos(input)


@lowers("Atan", since=7)
def atan(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Atan.html"""
    return torch.atan(input)


@lowers("Sinh", since=9)
def sinh(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Sinh.html"""
    return torch.sinh(input)


@lowers("Cosh", since=9)
def cosh(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Cosh.html"""
    return torch.cosh(input)


@lowers("Asinh", since=9)
def asinh(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Asinh.html"""
    return torch.asinh(input)


@lowers("Acosh", since=9)
def acosh(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Acosh.html"""
    return torch.acosh(input)


@lowers("Atanh", since=9)
def atanh(input: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Atanh.html"""
    return torch.atanh(input)

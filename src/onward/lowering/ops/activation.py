"""Activation functions, element by element."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.layout import with_gradient_alike
from onward.lowering.kernels.rematerialize import activated, rectified
from onward.lowering.kernels.unsigned import UNSIGNED
from onward.lowering.registry import lowers

_SELU_ALPHA, _SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875
"""What `F.selu` computes with, rounded to float32."""


lowers("Sigmoid", since=1, inputs=("X",))(torch.sigmoid)
lowers("Tanh", since=1, inputs=("input",))(torch.tanh)
lowers("Softsign", since=1, inputs=("input",))(F.softsign)


@lowers("Relu", since=1)
def relu(X: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Relu.html"""
    return with_gradient_alike(rectified(X))


@lowers("LeakyRelu", since=1)
def leaky_relu(X: Tensor, *, alpha: float = 0.01) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__LeakyRelu.html"""
    return with_gradient_alike(F.leaky_relu(X, alpha))


@lowers("PRelu", since=7)
def prelu(X: Tensor, slope: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__PRelu.html; the slope broadcasts to X."""
    if X.dtype in UNSIGNED:
        return X.clone()
    return torch.where(X < 0, slope * X, X)


@lowers("PRelu", since=1)
def prelu_before_7(X: Tensor, slope: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__PRelu.html; one slope in all, or one per channel (axis 1)."""
    if slope.numel() > 1 and X.ndim > 2:
        slope = slope.reshape(-1, *(1,) * (X.ndim - 2))
    return torch.where(X < 0, slope * X, X)


@lowers("Elu", since=1)
def elu(X: Tensor, *, alpha: float = 1.0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Elu.html"""
    return with_gradient_alike(F.elu(X, alpha))


@lowers("Selu", since=6)
def selu(X: Tensor, *, alpha: float = _SELU_ALPHA, gamma: float = _SELU_GAMMA) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Selu.html"""
    if alpha == _SELU_ALPHA and gamma == _SELU_GAMMA:
        return F.selu(X)
    return gamma * F.elu(X, alpha)


@lowers("Selu", since=1)
def selu_before_6(X: Tensor, *, alpha: float = 1.673200011253357, gamma: float = 1.0506999492645264) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Selu.html; coarser defaults."""
    return gamma * F.elu(X, alpha)


@lowers("Celu", since=12)
def celu(X: Tensor, *, alpha: float = 1.0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Celu.html"""
    return F.celu(X, alpha)


@lowers("Gelu", since=20)
def gelu(X: Tensor, *, approximate: str = "none") -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Gelu.html"""
    return with_gradient_alike(F.gelu(X, approximate=approximate))


@lowers("HardSigmoid", since=1)
def hard_sigmoid(X: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__HardSigmoid.html"""
    if beta == 0.5 and abs(alpha - 1 / 6) < 1e-7:
        return F.hardsigmoid(X)
    return torch.clamp(alpha * X + beta, 0, 1)


@lowers("HardSwish", since=14)
def hard_swish(X: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__HardSwish.html"""
    return with_gradient_alike(activated(X, F.hardswish, torch.ops.aten.hardswish_))


lowers("Mish", since=18, inputs=("X",))(F.mish)


@lowers("Swish", since=24)
def swish(X: Tensor, *, alpha: float = 1.0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Swish.html"""
    if alpha != 1.0:
        return X * torch.sigmoid(alpha * X)
    return with_gradient_alike(activated(X, F.silu, torch.ops.aten.silu_))


@lowers("SwiGLU", since=28)
def swiglu(A: Tensor, B: Tensor, *, alpha: float = 1.0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__SwiGLU.html"""
    if A.shape != B.shape:
        raise ValueError(f"gate A {list(A.shape)} and value B {list(B.shape)} must have the same shape.")
    return swish(A, alpha=alpha) * B


@lowers("Softplus", since=1)
def softplus(X: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Softplus.html; linear above 40, where float64 sees no difference."""
    return F.softplus(X, threshold=40.0)


@lowers("ThresholdedRelu", since=10)
def thresholded_relu(X: Tensor, *, alpha: float = 1.0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__ThresholdedRelu.html"""
    return F.threshold(X, alpha, 0.0)


@lowers("Shrink", since=9)
def shrink(input: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Shrink.html"""
    x = input.to(torch.float64) if not input.dtype.is_floating_point else input
    outside = torch.where(x < -lambd, x + bias, x - bias)
    return torch.where(x.abs() > lambd, outside, 0.0).to(input.dtype)

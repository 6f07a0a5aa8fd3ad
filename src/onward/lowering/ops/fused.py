"""Nodes of the domain `onward.fused`, which stand for several written-out ones: linear layers, norms, activations.

They take part in torch's autocast as its own functions do: norms give float32 there, the others what they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.graph.fusion.rewriting import DOMAIN
from onward.lowering.kernels import matmuls as products
from onward.lowering.kernels.large_means import group_norm
from onward.lowering.kernels.layer_norms import layer_norm
from onward.lowering.ops.activation import gelu, swish
from onward.lowering.passes import is_plain, only_first_derivative
from onward.lowering.registry import lowers

lowers("Gelu", domain=DOMAIN)(gelu)
lowers("Swish", domain=DOMAIN)(swish)


@lowers("Softplus", domain=DOMAIN)
def softplus(X: Tensor, *, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """`log(1 + exp(beta X)) / beta`, and X where `beta X` exceeds the threshold."""
    return F.softplus(X, beta, threshold)


@lowers("NanToNum", domain=DOMAIN)
def nan_to_num(X: Tensor, *, nan: float, posinf: float, neginf: float) -> Tensor:
    """X with numbers instead of NaN and both infinities, through which no gradient flows."""
    return torch.nan_to_num(X, nan, posinf, neginf)


@lowers("StopGradient", domain=DOMAIN)
def stop_gradient(X: Tensor) -> Tensor:
    """X, through which no gradient flows."""
    return X.detach()


@lowers("Linear", domain=DOMAIN)
def linear(X: Tensor, W: Tensor, B: Tensor | None = None, *, rows_are_outputs: int = 0) -> Tensor:
    """`X W + B` of X [..., K], W [K, N] and B [N]; W is [N, K] if `rows_are_outputs`."""
    return products.linear(X, W if rows_are_outputs else W.T, B)


@lowers("LayerNormalization", domain=DOMAIN)
def layer_normalization(
    X: Tensor, Scale: Tensor | None = None, B: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5
) -> Tensor:
    """`(X - mean) / sqrt(variance + epsilon) * Scale + B` over the axes from `axis` on, which Scale and B have."""
    dtype = _widest(X, Scale, B)
    scale, bias = (None if p is None else p.to(dtype) for p in (Scale, B))
    return layer_norm(X.to(dtype), X.shape[axis:], scale, bias, epsilon)


@lowers("GroupNormalization", domain=DOMAIN)
def group_normalization(
    X: Tensor, scale: Tensor | None = None, bias: Tensor | None = None, *, num_groups: int, epsilon: float = 1e-5
) -> Tensor:
    """Groups of the channels of X [N, C, ...] less their mean, by their deviation, times scale [C], plus bias [C]."""
    dtype = _widest(X, scale, bias)
    weight, offset = (None if p is None else p.to(dtype) for p in (scale, bias))
    return group_norm(X.to(dtype), num_groups, weight, offset, epsilon)


@lowers("RMSNormalization", domain=DOMAIN)
def rms_normalization(X: Tensor, scale: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    """`X / sqrt(mean(X²) + epsilon) * scale` over the axes from `axis` on (Zhang and Sennrich, 2019)."""
    dtype = _widest(X, scale)
    return rms_norm(X.to(dtype), X.shape[axis:], None if scale is None else scale.to(dtype), epsilon)


def rms_norm(x: Tensor, shape: Sequence[int], scale: Tensor | None, epsilon: float) -> Tensor:
    """`F.rms_norm`; on a CPU, where torch has no kernel for it, only x and scale are kept for the backward pass."""
    if x.is_cuda or scale is None or scale.dtype != x.dtype or torch.compiler.is_compiling() or not is_plain(x):
        return F.rms_norm(x, shape, scale, epsilon)
    result: Tensor = _RMSNorm.apply(x, scale, epsilon)  # type: ignore[no-untyped-call]
    return result


class _RMSNorm(torch.autograd.Function):
    """RMS normalization over the axes of scale, the last ones of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
        """In as few passes over x as there can be; 16 bits as torch does it."""
        ctx.epsilon = epsilon
        if x.dtype not in (torch.float32, torch.float64):
            ctx.save_for_backward(x, scale, None)
            return F.rms_norm(x, scale.shape, scale, epsilon)
        inverse = _inverse_rms(x, tuple(range(-scale.dim(), 0)), scale.numel(), epsilon)
        ctx.save_for_backward(x, scale, inverse)
        return (x * inverse).mul_(scale)

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """With s = 1 / rms: `gradient scale s - x s³ mean(gradient scale x)`, and the sum of `gradient x s`."""
        x, scale, inverse = ctx.saved_tensors
        dtype, width = torch.promote_types(x.dtype, torch.float32), scale.numel()
        given, rows = (tensor.to(dtype).reshape(-1, width) for tensor in (gradients[0], x))
        factor = scale.to(dtype).reshape(width, 1)
        inverse = _inverse_rms(rows, (-1,), width, ctx.epsilon) if inverse is None else inverse.reshape(-1, 1)
        product = given * rows
        of_x = of_scale = None
        share = (product @ factor).mul_(inverse.pow(3)).mul_(-1 / width)
        if ctx.needs_input_grad[1]:
            of_scale = product.mul_(inverse).sum(0).view(scale.shape).to(scale.dtype)
        if ctx.needs_input_grad[0]:
            of_rows = torch.mul(given, factor.T, out=product).mul_(inverse).addcmul_(rows, share)
            of_x = of_rows.view(x.shape).to(x.dtype)
        return of_x, of_scale, None


def _inverse_rms(x: Tensor, axes: tuple[int, ...], width: int, epsilon: float) -> Tensor:
    """`1 / sqrt(mean(x²) + epsilon)` over these axes, of so many numbers, which stay with size 1."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=axes, keepdim=True)
    return norm.square_().mul_(1 / width).add_(epsilon).rsqrt_()


def _widest(X: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """The widest type among tensors, as the written-out arithmetic has it; at least float32 under autocast."""
    lowest = torch.promote_types(X.dtype, torch.float32) if torch.is_autocast_enabled(X.device.type) else X.dtype
    return reduce(torch.promote_types, [p.dtype for p in parameters if p is not None], lowest)


@lowers("SwiGLU", domain=DOMAIN)
def swiglu(A: Tensor, B: Tensor, *, alpha: float = 1.0) -> Tensor:
    """`A sigmoid(alpha A) B`; keeps A and B for the backward pass and nothing else."""
    if alpha != 1.0 or A.dtype != B.dtype or torch.compiler.is_compiling() or not is_plain(A):
        return swish(A, alpha=alpha) * B
    result: Tensor = _SwiGLU.apply(A, B)  # type: ignore[no-untyped-call]
    return result


class _SwiGLU(torch.autograd.Function):
    """SiLU of one operand times the other; the SiLU is recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, gate: Tensor, value: Tensor) -> Tensor:
        """The product."""
        ctx.save_for_backward(gate, value)
        return F.silu(gate).mul_(value)

    @staticmethod
    @only_first_derivative
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """`d silu(a) = sigmoid(a) (1 + a (1 - sigmoid(a)))`, torch's own backward of it."""
        (gradient,) = gradients
        gate, value = ctx.saved_tensors  # type: ignore[attr-defined]
        of_gate = of_value = None
        if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            of_gate = torch.ops.aten.silu_backward(gradient * value, gate)
        if ctx.needs_input_grad[1]:  # type: ignore[attr-defined]
            of_value = F.silu(gate).mul_(gradient)
        return of_gate, of_value


@lowers("RotaryEmbedding", domain=DOMAIN)
def rotary_embedding(X: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: int = 0) -> Tensor:
    """`X cosine + turned(X) sine` (Su et al., 2021); the tables broadcast to X [..., D].

    `turned` is (-second half, first half) or, interleaved, (-x1, x0, -x3, x2, ...).
    """
    if cosine.shape[-1] != X.shape[-1] or sine.shape[-1] != X.shape[-1]:
        cosine, sine = cosine.expand(*cosine.shape[:-1], X.shape[-1]), sine.expand(*sine.shape[:-1], X.shape[-1])
    is_usual = X.dtype == cosine.dtype == sine.dtype and not (cosine.requires_grad or sine.requires_grad)
    if is_usual and _fits(cosine, X) and _fits(sine, X) and is_plain(X) and not torch.compiler.is_compiling():
        result: Tensor = _Rotary.apply(X, cosine, sine, bool(interleaved))  # type: ignore[no-untyped-call]
        return result
    (first, second), (c_first, c_second), (s_first, s_second) = (
        _pairs(tensor, bool(interleaved)) for tensor in (X, cosine, sine)
    )
    real = first * c_first - second * s_first
    imaginary = second * c_second + first * s_second
    return torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)


def _fits(table: Tensor, X: Tensor) -> bool:
    """Whether X has the shape that both broadcast to."""
    own = X.shape[X.dim() - table.dim() :]
    return table.dim() <= X.dim() and all(size in (1, full) for size, full in zip(table.shape, own, strict=True))


def _pairs(tensor: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """What is turned together: views of halves, or of neighbors."""
    if interleaved:
        return tensor[..., 0::2], tensor[..., 1::2]
    first, second = tensor.chunk(2, -1)
    return first, second


class _Rotary(torch.autograd.Function):
    """Turned in place of a product with the cosines; the gradient is turned back, and only the tables are kept."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
        """`X cosine + turned(X) sine`."""
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        result = X * cosine
        (real, imaginary), (first, second), (s_first, s_second) = (_pairs(t, interleaved) for t in (result, X, sine))
        real.addcmul_(second, s_first, value=-1)
        imaginary.addcmul_(first, s_second)
        return result

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """`G cosine` and, for each, the other's gradient times the other's sine."""
        cosine, sine = ctx.saved_tensors
        (G,) = gradients
        result = G * cosine
        (first, second), (real, imaginary), (s_first, s_second) = (
            _pairs(tensor, ctx.interleaved) for tensor in (result, G, sine)
        )
        first.addcmul_(imaginary, s_second)
        second.addcmul_(real, s_first, value=-1)
        return result, None, None, None

"""Fused operators of the domain com.microsoft, as ONNX Runtime's optimizer writes them into a saved model.

Their meaning is that of onnxruntime's documentation (docs/ContribOperators.md) and of its CPU kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.graph.nodes.structure import MICROSOFT
from onward.lowering.kernels.dtypes import wide_type
from onward.lowering.ops.convolution import conv
from onward.lowering.ops.linear import gemm, matmul
from onward.lowering.ops.random import dropout
from onward.lowering.registry import lowers, takes_attributes_of

_ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], tuple[float, ...]]] = {
    "Relu": (torch.relu, ()),
    "Sigmoid": (torch.sigmoid, ()),
    "Tanh": (torch.tanh, ()),
    "Softplus": (F.softplus, ()),
    "Softsign": (F.softsign, ()),
    "Gelu": (F.gelu, ()),
    "LeakyRelu": (F.leaky_relu, (0.01,)),
    "Elu": (F.elu, (1.0,)),
    "Celu": (F.celu, (1.0,)),
    "ThresholdedRelu": (lambda x, alpha: torch.where(x > alpha, x, 0), (1.0,)),
    "Selu": (lambda x, alpha, gamma: gamma * F.elu(x, alpha), (1.67326319217681884765625, 1.05070102214813232421875)),
    "HardSigmoid": (lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1), (0.2, 0.5)),
    "Clip": (torch.clamp, (-torch.inf, torch.inf)),
}
"""Name -> (function, defaults of its parameters)."""


def activate(x: Tensor, name: str, parameters: Sequence[float | None]) -> Tensor:
    """A fused activation; absent parameters have their operator's defaults, "" is none.

    Raises:
        ValueError: the activation is unknown.
    """
    if not name:
        return x
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; known are {', '.join(_ACTIVATIONS)}.")
    function, defaults = _ACTIVATIONS[name]
    given = list(parameters)[: len(defaults)] + [None] * (len(defaults) - len(parameters))
    return function(x, *(default if value is None else value for value, default in zip(given, defaults, strict=True)))


@lowers("TransposeMatMul", domain=MICROSOFT)
@lowers("FusedMatMul", domain=MICROSOFT)
def fused_mat_mul(
    A: Tensor,
    B: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    """`alpha * A' B'`; `trans` swaps the last two axes, `transBatch` moves the first axis in front of the last."""
    product = matmul(_transposed(A, transA, transBatchA), _transposed(B, transB, transBatchB))
    return product if alpha == 1.0 else product * alpha


def _transposed(x: Tensor, swap: int, batch: int) -> Tensor:
    if batch and x.dim() > 2:
        x = x.movedim(0, -2)
    return x.transpose(-1, -2) if swap and x.dim() > 1 else x


@lowers("FusedMatMulActivation", domain=MICROSOFT)
@takes_attributes_of(fused_mat_mul)
def fused_mat_mul_activation(
    A: Tensor,
    B: Tensor,
    *,
    activation: str,
    activation_alpha: float | None = None,
    activation_axis: int | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    **attributes: Any,
) -> Tensor:
    """FusedMatMul, then an activation, or a softmax along `activation_axis`."""
    product = fused_mat_mul(A, B, **attributes)
    if activation == "Softmax":
        return torch.softmax(product, -1 if activation_axis is None else activation_axis)
    return activate(product, activation, _given(activation, activation_alpha, activation_beta, activation_gamma))


@lowers("FusedGemm", domain=MICROSOFT)
@takes_attributes_of(gemm)
def fused_gemm(
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    *,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    **attributes: Any,
) -> Tensor:
    """Gemm, then an activation."""
    product = gemm(A, B, C, **attributes)
    return activate(product, activation, _given(activation, activation_alpha, activation_beta, activation_gamma))


def _given(activation: str, alpha: float | None, beta: float | None, gamma: float | None) -> list[float | None]:
    """The parameters in the order of the activation's own attributes."""
    return [alpha, gamma] if activation == "Selu" else [alpha, beta]


@lowers("GemmFastGelu", domain=MICROSOFT)
def gemm_fast_gelu(X: Tensor, W: Tensor, bias: Tensor | None = None) -> Tensor:
    """`FastGelu(X W + bias)`."""
    return fast_gelu(matmul(X, W), bias)


@lowers("FusedConv", domain=MICROSOFT)
@takes_attributes_of(conv)
def fused_conv(
    X: Tensor,
    W: Tensor,
    B: Tensor | None = None,
    Z: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: tuple[float, ...] = (),
    **attributes: Any,
) -> Tensor:
    """Conv, plus Z, then an activation."""
    Y = conv(X, W, B, **attributes)
    return activate(Y if Z is None else Y + Z, activation, activation_params)


@lowers("NhwcConv", domain=MICROSOFT)
@takes_attributes_of(conv)
def nhwc_conv(X: Tensor, W: Tensor, B: Tensor | None = None, **attributes: Any) -> Tensor:
    """Conv with the channels last: X (N, D1..Dn, C), W (M, k1..kn, C/g)."""
    return conv(X.movedim(-1, 1), W.movedim(-1, 1), B, **attributes).movedim(1, -1)


lowers("Gelu", domain=MICROSOFT, inputs=("X",))(F.gelu)


@lowers("BiasGelu", domain=MICROSOFT)
def bias_gelu(A: Tensor, B: Tensor) -> Tensor:
    """The exact GELU of `A + B`."""
    return F.gelu(A + B)


@lowers("FastGelu", domain=MICROSOFT)
def fast_gelu(X: Tensor, bias: Tensor | None = None) -> Tensor:
    """GELU by its tanh approximation, of `X + bias`."""
    return F.gelu(X if bias is None else X + bias, approximate="tanh")


@lowers("QuickGelu", domain=MICROSOFT)
def quick_gelu(X: Tensor, *, alpha: float = 1.702) -> Tensor:
    """`X * sigmoid(alpha * X)`."""
    return F.silu(X) if alpha == 1.0 else X * torch.sigmoid(alpha * X)


@lowers("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(X: Tensor, bias: Tensor) -> Tensor:
    """`left * gelu(right)` of the halves of `X + bias` along the last axis."""
    left, right = (X + bias).chunk(2, dim=-1)
    return left * F.gelu(right)


@lowers("BiasAdd", domain=MICROSOFT)
def bias_add(X: Tensor, bias: Tensor, skip: Tensor) -> Tensor:
    """`X + bias + skip`."""
    return X + bias + skip


@lowers("BiasSoftmax", domain=MICROSOFT)
def bias_softmax(data: Tensor, bias: Tensor, *, axis: int = 1, is_inner_broadcast: int) -> Tensor:
    """Softmax of `data + bias` over all axes from `axis` on; the bias has ones where it is broadcast."""
    total = data + bias
    first = axis % total.dim()
    return torch.softmax(total.flatten(first), dim=-1).reshape(total.shape)


@lowers("BiasDropout", domain=MICROSOFT, host=("ratio", "training_mode"))
def bias_dropout(
    data: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    ratio: float | None = None,
    training_mode: bool | None = None,
    *,
    seed: int | None = None,
    training: bool,
    owned: tuple[bool, ...],
    output_count: int,
) -> tuple[Tensor, ...]:
    """Dropout of `data + bias`, plus `residual`; the mode is found as for Dropout. `seed` is not used."""
    known = (True, True, owned[4] if len(owned) > 4 else True)
    Y, *mask = dropout(
        data + bias, ratio, training_mode, seed=seed, training=training, owned=known, output_count=output_count
    )
    return (Y if residual is None else Y + residual, *mask)


@lowers("Inverse", domain=MICROSOFT)
def inverse(X: Tensor) -> Tensor:
    """The inverses of the matrices in the last two axes."""
    wide = X.to(wide_type(X.dtype))
    inverses: Tensor = torch.linalg.inv(wide)
    return inverses.to(X.dtype)


@lowers("Trilu", domain=MICROSOFT, host=("k",))
def trilu(X: Tensor, k: int | None = None, *, upper: int = 1) -> Tensor:
    """The upper or lower triangle of the matrices in the last two axes."""
    diagonal = 0 if k is None else int(k)
    return X.triu(diagonal) if upper else X.tril(diagonal)


@lowers("ExpandDims", domain=MICROSOFT, host=("axis",))
def expand_dims(X: Tensor, axis: int) -> Tensor:
    """A new axis of one element."""
    return X.unsqueeze(int(axis))

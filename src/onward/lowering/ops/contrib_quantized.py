"""Quantized operators of the domain com.microsoft, as ONNX Runtime's quantizer and optimizer write them.

Their meaning is that of onnxruntime's documentation (docs/ContribOperators.md). Tensors of stored integers have no
gradient; activations, scales and biases in floating point have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from onward.graph.nodes.structure import MICROSOFT
from onward.lowering.ops.contrib_normalization import embed_layer_normalization
from onward.lowering.ops.pooling import average_pool
from onward.lowering.ops.quantization import INTEGER_RANGE
from onward.lowering.ops.quantized_arithmetic import q_linear_conv
from onward.lowering.registry import lowers, takes_attributes_of

_RANGE = {dtype: INTEGER_RANGE[ir.DataType[name]] for name, dtype in (("UINT8", torch.uint8), ("INT8", torch.int8))}


def real_values(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """What a tensor of quantized numbers stands for."""
    shift = 0 if zero_point is None else zero_point.to(torch.float32)
    return (x.to(torch.float32) - shift) * scale.to(torch.float32)


def stored_values(y: Tensor, scale: Tensor, zero_point: Tensor | None, like: Tensor) -> Tensor:
    """The quantized numbers of a real tensor, in the type of `zero_point`, or of `like` without one."""
    dtype = like.dtype if zero_point is None else zero_point.dtype
    shift = 0 if zero_point is None else zero_point.to(torch.float32)
    return torch.clamp(torch.round(y / scale.to(torch.float32)) + shift, *_RANGE[dtype]).to(dtype)


def _q_linear(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """An elementwise operator of two quantized tensors."""

    def call(
        A: Tensor,
        A_scale: Tensor,
        A_zero_point: Tensor | None,
        B: Tensor,
        B_scale: Tensor,
        B_zero_point: Tensor | None,
        C_scale: Tensor,
        C_zero_point: Tensor | None = None,
    ) -> Tensor:
        result = combine(real_values(A, A_scale, A_zero_point), real_values(B, B_scale, B_zero_point))
        return stored_values(result, C_scale, C_zero_point, A)

    return call


lowers("QLinearAdd", domain=MICROSOFT)(_q_linear(torch.add))
lowers("QLinearMul", domain=MICROSOFT)(_q_linear(torch.mul))


@lowers("QLinearSigmoid", domain=MICROSOFT)
def q_linear_sigmoid(
    X: Tensor,
    X_scale: Tensor,
    X_zero_point: Tensor | None,
    Y_scale: Tensor,
    Y_zero_point: Tensor | None = None,
) -> Tensor:
    """Sigmoid of a quantized tensor."""
    return stored_values(torch.sigmoid(real_values(X, X_scale, X_zero_point)), Y_scale, Y_zero_point, X)


@lowers("QLinearLeakyRelu", domain=MICROSOFT)
def q_linear_leaky_relu(
    X: Tensor,
    X_scale: Tensor,
    X_zero_point: Tensor | None,
    Y_scale: Tensor,
    Y_zero_point: Tensor | None = None,
    *,
    alpha: float = 0.01,
) -> Tensor:
    """LeakyRelu of a quantized tensor."""
    activated = torch.nn.functional.leaky_relu(real_values(X, X_scale, X_zero_point), alpha)
    return stored_values(activated, Y_scale, Y_zero_point, X)


@lowers("QLinearSoftmax", domain=MICROSOFT)
def q_linear_softmax(
    X: Tensor,
    X_scale: Tensor,
    x_zero_point: Tensor | None,
    y_scale: Tensor,
    y_zero_point: Tensor,
    *,
    axis: int = -1,
    opset: int,
) -> Tensor:
    """Softmax of a quantized tensor; below opset 13 over all axes from `axis` on.

    onnxruntime multiplies by the inverse of the scale without its fraction: 254 for a scale of float32(1 / 255).
    """
    real = real_values(X, X_scale, x_zero_point)
    if opset < 13:
        first = axis % X.dim()
        shares = torch.softmax(real.flatten(first), -1).reshape(X.shape)
    else:
        shares = torch.softmax(real, axis)
    return stored_values(shares, torch.floor(1 / y_scale).reciprocal(), y_zero_point, X)


@lowers("QLinearConcat", domain=MICROSOFT)
def q_linear_concat(Y_scale: Tensor, Y_zero_point: Tensor, *inputs: Tensor, axis: int) -> Tensor:
    """Quantized tensors side by side; `inputs` are tensor, scale and zero point of each."""
    parts = [real_values(*inputs[place : place + 3]) for place in range(0, len(inputs), 3)]
    return stored_values(torch.cat(parts, axis), Y_scale, Y_zero_point, Y_zero_point)


@lowers("QLinearWhere", domain=MICROSOFT)
def q_linear_where(
    condition: Tensor,
    X: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    Y: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
    z_scale: Tensor,
    z_zero_point: Tensor,
) -> Tensor:
    """Where of two quantized tensors."""
    chosen = torch.where(condition, real_values(X, x_scale, x_zero_point), real_values(Y, y_scale, y_zero_point))
    return stored_values(chosen, z_scale, z_zero_point, X)


@lowers("QLinearGlobalAveragePool", domain=MICROSOFT)
def q_linear_global_average_pool(
    X: Tensor, x_scale: Tensor, x_zero_point: Tensor, y_scale: Tensor, y_zero_point: Tensor, *, channels_last: int = 0
) -> Tensor:
    """GlobalAveragePool of a quantized tensor."""
    axes = tuple(range(1, X.dim() - 1) if channels_last else range(2, X.dim()))
    return stored_values(real_values(X, x_scale, x_zero_point).mean(axes, keepdim=True), y_scale, y_zero_point, X)


@lowers("QLinearAveragePool", domain=MICROSOFT)
@takes_attributes_of(average_pool, without=("dilations",))
def q_linear_average_pool(
    X: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    y_scale: Tensor,
    y_zero_point: Tensor | None = None,
    *,
    channels_last: int = 0,
    **attributes: Any,
) -> Tensor:
    """AveragePool of a quantized tensor."""
    real = real_values(X, x_scale, x_zero_point)
    pooled = average_pool(real.movedim(-1, 1) if channels_last else real, **attributes)
    return stored_values(pooled.movedim(1, -1) if channels_last else pooled, y_scale, y_zero_point, X)


@lowers("QLinearConv", domain=MICROSOFT)
@takes_attributes_of(q_linear_conv)
def q_linear_conv_of_either_layout(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
    B: Tensor | None = None,
    *,
    channels_last: int = 0,
    **attributes: Any,
) -> Tensor:
    """QLinearConv of the standard, of x (N, C, ...) or, with `channels_last`, (N, ..., C); the weight is as ever."""
    images, quantized = x.movedim(-1, 1) if channels_last else x, (x_scale, x_zero_point, w, w_scale, w_zero_point)
    result = q_linear_conv(images, *quantized, y_scale, y_zero_point, B, **attributes)
    return result.movedim(1, -1) if channels_last else result


@lowers("QEmbedLayerNormalization", domain=MICROSOFT)
def q_embed_layer_normalization(
    input_ids: Tensor,
    segment_ids: Tensor | None,
    word_embedding: Tensor,
    position_embedding: Tensor,
    segment_embedding: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    word_embedding_scale: Tensor,
    position_embedding_scale: Tensor,
    segment_embedding_scale: Tensor | None,
    gamma_scale: Tensor,
    beta_scale: Tensor,
    word_embedding_zero_point: Tensor,
    position_embedding_zero_point: Tensor,
    segment_embedding_zero_point: Tensor | None,
    gamma_zero_point: Tensor,
    beta_zero_point: Tensor,
    *,
    epsilon: float = 1e-12,
    output_count: int,
) -> tuple[Tensor, ...]:
    """EmbedLayerNormalization of quantized tables, gain and shift; its first two outputs."""
    segments = None
    if segment_embedding is not None and segment_embedding_scale is not None:
        segments = real_values(segment_embedding, segment_embedding_scale, segment_embedding_zero_point)
    return embed_layer_normalization(
        input_ids,
        segment_ids,
        real_values(word_embedding, word_embedding_scale, word_embedding_zero_point),
        real_values(position_embedding, position_embedding_scale, position_embedding_zero_point),
        segments,
        real_values(gamma, gamma_scale, gamma_zero_point),
        real_values(beta, beta_scale, beta_zero_point),
        mask,
        epsilon=epsilon,
        output_count=output_count,
    )

"""Quantized operators of the domain com.microsoft, as ONNX Runtime's quantizer and optimizer write them.

Their meaning is that of onnxruntime's documentation (docs/ContribOperators.md). Tensors of stored integers have no
gradient; activations, scales and biases in floating point have one.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.ops.contrib import MICROSOFT
from onward.lowering.ops.contrib_attention import packed_attention
from onward.lowering.ops.contrib_normalization import embed_layer_normalization
from onward.lowering.ops.pooling import average_pool
from onward.lowering.ops.quantization import (
    INTEGER_RANGE,
    dequantize_linear_before_21,
    quantize_linear_before_19,
    round_straight_through,
)
from onward.lowering.ops.quantized_arithmetic import q_linear_conv
from onward.lowering.ops.recurrent import recur_lstm
from onward.lowering.registry import lowers

lowers("QuantizeLinear", domain=MICROSOFT)(quantize_linear_before_19)
lowers("DequantizeLinear", domain=MICROSOFT)(dequantize_linear_before_21)

_RANGE = {dtype: INTEGER_RANGE[ir.DataType[name]] for name, dtype in (("UINT8", torch.uint8), ("INT8", torch.int8))}


def _real(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """What a tensor of quantized numbers stands for."""
    shift = 0 if zero_point is None else zero_point.to(torch.float32)
    return (x.to(torch.float32) - shift) * scale.to(torch.float32)


def _stored(y: Tensor, scale: Tensor, zero_point: Tensor | None, like: Tensor) -> Tensor:
    """The quantized numbers of a real tensor, in the type of `zero_point`, or of `like` without one."""
    dtype = like.dtype if zero_point is None else zero_point.dtype
    shift = 0 if zero_point is None else zero_point.to(torch.float32)
    return torch.clamp(torch.round(y / scale.to(torch.float32)) + shift, *_RANGE[dtype]).to(dtype)


@lowers("QLinearAdd", domain=MICROSOFT)
def q_linear_add(
    A: Tensor,
    A_scale: Tensor,
    A_zero_point: Tensor | None,
    B: Tensor,
    B_scale: Tensor,
    B_zero_point: Tensor | None,
    C_scale: Tensor,
    C_zero_point: Tensor | None = None,
) -> Tensor:
    """The sum of two quantized tensors."""
    total = _real(A, A_scale, A_zero_point) + _real(B, B_scale, B_zero_point)
    return _stored(total, C_scale, C_zero_point, A)


@lowers("QLinearMul", domain=MICROSOFT)
def q_linear_mul(
    A: Tensor,
    A_scale: Tensor,
    A_zero_point: Tensor | None,
    B: Tensor,
    B_scale: Tensor,
    B_zero_point: Tensor | None,
    C_scale: Tensor,
    C_zero_point: Tensor | None = None,
) -> Tensor:
    """The product of two quantized tensors, element by element."""
    product = _real(A, A_scale, A_zero_point) * _real(B, B_scale, B_zero_point)
    return _stored(product, C_scale, C_zero_point, A)


@lowers("QLinearSigmoid", domain=MICROSOFT)
def q_linear_sigmoid(
    X: Tensor,
    X_scale: Tensor,
    X_zero_point: Tensor | None,
    Y_scale: Tensor,
    Y_zero_point: Tensor | None = None,
) -> Tensor:
    """Sigmoid of a quantized tensor."""
    return _stored(torch.sigmoid(_real(X, X_scale, X_zero_point)), Y_scale, Y_zero_point, X)


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
    activated = torch.nn.functional.leaky_relu(_real(X, X_scale, X_zero_point), alpha)
    return _stored(activated, Y_scale, Y_zero_point, X)


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
    """Softmax of a quantized tensor; below opset 13 over all axes from `axis` on."""
    real = _real(X, X_scale, x_zero_point)
    if opset < 13:
        first = axis % X.dim()
        shares = torch.softmax(real.flatten(first), -1).reshape(X.shape)
    else:
        shares = torch.softmax(real, axis)
    return _stored(shares, y_scale, y_zero_point, X)


@lowers("QLinearConcat", domain=MICROSOFT)
def q_linear_concat(Y_scale: Tensor, Y_zero_point: Tensor, *inputs: Tensor, axis: int) -> Tensor:
    """Quantized tensors side by side; `inputs` are tensor, scale and zero point of each."""
    parts = [_real(*inputs[place : place + 3]) for place in range(0, len(inputs), 3)]
    return _stored(torch.cat(parts, axis), Y_scale, Y_zero_point, Y_zero_point)


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
    chosen = torch.where(condition, _real(X, x_scale, x_zero_point), _real(Y, y_scale, y_zero_point))
    return _stored(chosen, z_scale, z_zero_point, X)


@lowers("QLinearGlobalAveragePool", domain=MICROSOFT)
def q_linear_global_average_pool(
    X: Tensor, x_scale: Tensor, x_zero_point: Tensor, y_scale: Tensor, y_zero_point: Tensor, *, channels_last: int = 0
) -> Tensor:
    """GlobalAveragePool of a quantized tensor."""
    axes = tuple(range(1, X.dim() - 1) if channels_last else range(2, X.dim()))
    return _stored(_real(X, x_scale, x_zero_point).mean(axes, keepdim=True), y_scale, y_zero_point, X)


@lowers("QLinearAveragePool", domain=MICROSOFT)
def q_linear_average_pool(
    X: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None,
    y_scale: Tensor,
    y_zero_point: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    channels_last: int = 0,
    count_include_pad: int = 0,
    kernel_shape: tuple[int, ...],
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """AveragePool of a quantized tensor."""
    real = _real(X, x_scale, x_zero_point)
    pooled = average_pool(
        real.movedim(-1, 1) if channels_last else real,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    return _stored(pooled.movedim(1, -1) if channels_last else pooled, y_scale, y_zero_point, X)


@lowers("QLinearConv", domain=MICROSOFT)
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
    auto_pad: str = "NOTSET",
    channels_last: int = 0,
    dilations: tuple[int, ...] | None = None,
    group: int = 1,
    kernel_shape: tuple[int, ...] | None = None,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
    element_types: tuple[int | None, ...],
) -> Tensor:
    """QLinearConv of the standard, of x (N, C, ...) or, with `channels_last`, (N, ..., C); the weight is as ever."""
    result = q_linear_conv(
        x.movedim(-1, 1) if channels_last else x,
        x_scale,
        x_zero_point,
        w,
        w_scale,
        w_zero_point,
        y_scale,
        y_zero_point,
        B,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
        element_types=element_types,
    )
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
        segments = _real(segment_embedding, segment_embedding_scale, segment_embedding_zero_point)
    return embed_layer_normalization(
        input_ids,
        segment_ids,
        _real(word_embedding, word_embedding_scale, word_embedding_zero_point),
        _real(position_embedding, position_embedding_scale, position_embedding_zero_point),
        segments,
        _real(gamma, gamma_scale, gamma_zero_point),
        _real(beta, beta_scale, beta_zero_point),
        mask,
        epsilon=epsilon,
        output_count=output_count,
    )


@lowers("QGemm", domain=MICROSOFT)
def q_gemm(
    A: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor,
    B: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor,
    C: Tensor | None = None,
    y_scale: Tensor | None = None,
    y_zero_point: Tensor | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """Gemm of quantized matrices; C counts in units of alpha * a_scale * b_scale. Without `y_scale` Y is float32."""
    # Sums of products of 8-bit numbers are exact in float64.
    left = A.to(torch.float64) - a_zero_point.to(torch.float64)
    shift = b_zero_point.to(torch.float64)
    right = B.to(torch.float64) - (shift[:, None] if transB and shift.dim() == 1 and shift.numel() > 1 else shift)
    product = (left.T if transA else left) @ (right.T if transB else right)
    product = product if C is None else product + C.to(torch.float64)
    real = (product * (alpha * a_scale.to(torch.float64) * b_scale.to(torch.float64))).to(torch.float32)
    return real if y_scale is None else _stored(real, y_scale, y_zero_point, A)


@lowers("MatMulIntegerToFloat", domain=MICROSOFT)
def mat_mul_integer_to_float(
    A: Tensor,
    B: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero_point: Tensor | None = None,
    b_zero_point: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The real product of quantized matrices, plus `bias`; scales of B per tensor or per column."""
    product = torch.matmul(_real(A, a_scale, a_zero_point), _real(B, b_scale, b_zero_point))
    product = product.to(a_scale.dtype)
    return product if bias is None else product + bias


@lowers("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_mat_mul(
    A: Tensor, B: Tensor, b_scale: Tensor, b_zero_point: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """A quantized to its own range of 8 bits, times a quantized B; the gradient passes the rounding unchanged."""
    product = torch.matmul(_in_own_range(A), _real(B, b_scale, b_zero_point))
    return product if bias is None else product + bias


def _in_own_range(A: Tensor) -> Tensor:
    """What 8 bits over the range of A, zero included, keep of it; the gradient passes the rounding unchanged."""
    low, high = A.detach().amin().clamp(max=0), A.detach().amax().clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, 1, scale)
    zero_point = torch.round(-low / scale).clamp(0, 255)
    return (round_straight_through(A / scale, zero_point, ir.DataType.UINT8) - zero_point) * scale


@lowers("DynamicQuantizeLSTM", domain=MICROSOFT)
def dynamic_quantize_lstm(
    X: Tensor,
    W: Tensor,
    R: Tensor,
    B: Tensor | None,
    sequence_lens: Tensor | None,
    initial_h: Tensor | None,
    initial_c: Tensor | None,
    P: Tensor | None,
    W_scale: Tensor,
    W_zero_point: Tensor,
    R_scale: Tensor,
    R_zero_point: Tensor,
    *,
    activation_alpha: tuple[float, ...] | None = None,
    activation_beta: tuple[float, ...] | None = None,
    activations: tuple[str, ...] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    output_count: int,
) -> tuple[Tensor, ...]:
    """LSTM of quantized W (D, I, 4*H) and R (D, H, 4*H); X and every step's hidden state take 8 bits of their range.

    Scales and zero points are (D) or (D, 4*H). The gradient passes the rounding unchanged.
    """
    if sequence_lens is not None:
        # What lies behind the longest sequence is not read, so its range does not count.
        read = torch.arange(X.shape[0], device=X.device) < sequence_lens.max()
        X = torch.where(read[:, None, None], X, 0)
    return recur_lstm(
        X,
        _real_gates(W, W_scale, W_zero_point),
        _real_gates(R, R_scale, R_zero_point),
        B,
        sequence_lens,
        (initial_h, initial_c),
        P,
        lambda x, weight, bias: F.linear(_in_own_range(x), weight, bias),
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        activations=activations,
        clip=clip,
        direction=direction,
        hidden_size=hidden_size,
        input_forget=input_forget,
        layout=0,
        output_count=output_count,
    )


def _real_gates(weight: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """(D, I, 4*H) of quantized numbers -> (D, 4*H, I) of what they stand for."""
    along = (weight.shape[0], 1, -1)
    return _real(weight, scale.reshape(along), zero_point.reshape(along)).transpose(1, 2)


@lowers("QAttention", domain=MICROSOFT)
def q_attention(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    input_scale: Tensor,
    weight_scale: Tensor,
    mask_index: Tensor | None = None,
    input_zero_point: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    past: Tensor | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
    output_count: int,
) -> tuple[Tensor, ...]:
    """Attention whose input (B, L, H) and projection (H, 3 * H) are quantized, scales of it per tensor or column."""
    return packed_attention(
        _real(input, input_scale, input_zero_point),
        _real(weight, weight_scale, weight_zero_point),
        bias,
        mask_index,
        past,
        do_rotary=do_rotary,
        mask_filter_value=mask_filter_value,
        num_heads=num_heads,
        past_present_share_buffer=past_present_share_buffer,
        scale=scale,
        unidirectional=unidirectional,
        output_count=output_count,
    )

"""Quantized products of the domain com.microsoft: matrices, recurrent nets and attention.

Their meaning is that of onnxruntime's documentation (docs/ContribOperators.md); gradients are those of
`contrib_quantized`.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.graph.nodes.structure import MICROSOFT
from onward.lowering.ops.contrib_attention import packed_attention
from onward.lowering.ops.contrib_quantized import real_values, stored_values
from onward.lowering.ops.quantization import round_straight_through
from onward.lowering.ops.recurrent import recur_lstm
from onward.lowering.registry import lowers, takes_attributes_of


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
    return real if y_scale is None else stored_values(real, y_scale, y_zero_point, A)


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
    product = torch.matmul(real_values(A, a_scale, a_zero_point), real_values(B, b_scale, b_zero_point))
    product = product.to(a_scale.dtype)
    return product if bias is None else product + bias


@lowers("DynamicQuantizeMatMul", domain=MICROSOFT)
def dynamic_quantize_mat_mul(
    A: Tensor, B: Tensor, b_scale: Tensor, b_zero_point: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """A quantized to its own range of 8 bits, times a quantized B; the gradient passes the rounding unchanged."""
    product = torch.matmul(_in_own_range(A), real_values(B, b_scale, b_zero_point))
    return product if bias is None else product + bias


def _in_own_range(A: Tensor) -> Tensor:
    """What 8 bits over the range of A, zero included, keep of it; the gradient passes the rounding unchanged."""
    low, high = A.detach().amin().clamp(max=0), A.detach().amax().clamp(min=0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, 1, scale)
    zero_point = torch.round(-low / scale).clamp(0, 255)
    return (round_straight_through(A / scale, zero_point, ir.DataType.UINT8) - zero_point) * scale


@lowers("DynamicQuantizeLSTM", domain=MICROSOFT)
@takes_attributes_of(recur_lstm, without=("layout",))
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
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """LSTM of quantized W (D, I, 4*H) and R (D, H, 4*H); X and every step's hidden state take 8 bits of their range.

    Scales and zero points are (D) or (D, 4*H). The gradient passes the rounding unchanged.
    """
    if sequence_lens is not None:
        # What is behind the longest sequence is not read, so its range does not count.
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
        **attributes,
    )


def _real_gates(weight: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """(D, I, 4*H) of quantized numbers -> (D, 4*H, I) of what they stand for."""
    along = (weight.shape[0], 1, -1)
    return real_values(weight, scale.reshape(along), zero_point.reshape(along)).transpose(1, 2)


@lowers("QAttention", domain=MICROSOFT)
@takes_attributes_of(packed_attention, without=("qkv_hidden_sizes", "rotary_embedding_dim"))
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
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Attention whose input (B, L, H) and projection (H, 3 * H) are quantized, scales of it per tensor or column."""
    return packed_attention(
        real_values(input, input_scale, input_zero_point),
        real_values(weight, weight_scale, weight_zero_point),
        bias,
        mask_index,
        past,
        **attributes,
    )

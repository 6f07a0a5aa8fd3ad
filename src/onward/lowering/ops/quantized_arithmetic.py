"""Matrix products and convolutions of quantized tensors.

The products of 8-bit numbers are summed in float64, which holds such sums exactly and, unlike int32, has a fast
matrix product on every device. Where the result only becomes real numbers, the quantized tensors arrive as floats and
the gradient passes (see `ops/quantization.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onward.lowering.ops.casting import cast_to, find_element_type
from onward.lowering.ops.convolution import conv
from onward.lowering.ops.quantization import INTEGER_RANGE
from onward.lowering.registry import lowers, takes_attributes_of


@lowers("MatMulInteger", since=10)
def mat_mul_integer(
    A: Tensor, B: Tensor, a_zero_point: Tensor | None = None, b_zero_point: Tensor | None = None
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__MatMulInteger.html; zero points per tensor, row of A, or column of B."""
    product = torch.matmul(_centred(A, a_zero_point, rows=True), _centred(B, b_zero_point, rows=False))
    return _as_integers(product, A, B)


def _as_integers(product: Tensor, *operands: Tensor) -> Tensor:
    """A product in int32, or as it is where an operand was quantized to floats for a gradient to pass."""
    if any(one.is_floating_point() for one in operands):
        return product
    return product.to(torch.int64).to(torch.int32)


@lowers("QLinearMatMul", since=10)
def q_linear_mat_mul(
    a: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
    *,
    element_types: tuple[int | None, ...],
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__QLinearMatMul.html; scales per tensor, row of a, or column of b."""
    product = torch.matmul(_centred(a, a_zero_point, rows=True), _centred(b, b_zero_point, rows=False))
    scale = _per_row(a_scale.to(torch.float64)) * b_scale.to(torch.float64)
    return _requantize(product * scale, y_scale, y_zero_point, element_types[7])


def _per_row(parameter: Tensor) -> Tensor:
    """A scale or zero point of one matrix's rows, [M], as a column [M, 1]; others have their place already."""
    return parameter.unsqueeze(-1) if parameter.ndim == 1 and parameter.numel() > 1 else parameter


def _centred(x: Tensor, zero_point: Tensor | None, rows: bool) -> Tensor:
    """Numbers without their zero point, in float64."""
    if zero_point is None:
        return x.to(torch.float64)
    shift = zero_point.to(torch.float64)
    return x.to(torch.float64) - (_per_row(shift) if rows else shift)


def _requantize(y: Tensor, scale: Tensor, zero_point: Tensor, known: int | None) -> Tensor:
    target = find_element_type(zero_point, known)
    scaled = y / scale.to(torch.float64)
    if target not in INTEGER_RANGE:
        return cast_to(scaled + zero_point.to(torch.float64), target)
    return torch.clamp(torch.round(scaled) + zero_point.to(torch.float64), *INTEGER_RANGE[target]).to(zero_point.dtype)


@lowers("ConvInteger", since=10)
@takes_attributes_of(conv, without=("channels_last_images",))
def conv_integer(
    x: Tensor,
    w: Tensor,
    x_zero_point: Tensor | None = None,
    w_zero_point: Tensor | None = None,
    **attributes: Any,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__ConvInteger.html; padding is with the zero point of x."""
    result = conv(
        _centred(x, x_zero_point, rows=False),
        w.to(torch.float64) - _per_channel(w_zero_point, w),
        **attributes,
    )
    return _as_integers(result, x, w)


def _per_channel(parameter: Tensor | None, w: Tensor) -> Tensor:
    """A scale or zero point per output channel, or of all, in a shape that broadcasts to the weight."""
    if parameter is None:
        return w.new_zeros((), dtype=torch.float64)
    return parameter.to(torch.float64).reshape(-1, *(1,) * (w.ndim - 1))


@lowers("QLinearConv", since=10)
@takes_attributes_of(conv, without=("channels_last_images",))
def q_linear_conv(
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
    element_types: tuple[int | None, ...],
    **attributes: Any,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__QLinearConv.html; the bias counts in units of x_scale * w_scale."""
    result = conv(
        _centred(x, x_zero_point, rows=False),
        w.to(torch.float64) - _per_channel(w_zero_point, w),
        None if B is None else B.to(torch.float64),
        **attributes,
    )
    scale = x_scale.to(torch.float64) * _per_channel(w_scale, w).reshape(-1, *(1,) * (x.ndim - 2))
    return _requantize(result * scale, y_scale, y_zero_point, element_types[7])

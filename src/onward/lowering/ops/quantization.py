"""Quantizing and dequantizing: per tensor, per axis, in blocks; integers of 2 to 16 bits, floats of 4 to 8.

A quantized tensor that is only ever dequantized again, or multiplied to real numbers, keeps its quantized values in
float32, and the rounding lets gradients pass unchanged inside the range that the type has and stops them outside:
quantization-aware training by the straight-through rule (Bengio et al., arXiv:1308.3432); scales get the gradient of
LSQ (Esser et al., arXiv:1902.08153) when they train.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from onward.graph.nodes.structure import MICROSOFT
from onward.lowering.kernels.dtypes import SMALL_FLOATS, TORCH_DTYPE
from onward.lowering.ops.casting import cast_to, find_element_type, round_to_small_float
from onward.lowering.registry import lowers

INTEGER_RANGE: dict[ir.DataType, tuple[int, int]] = {
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT16: (0, 65535),
    ir.DataType.INT16: (-32768, 32767),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT2: (0, 3),
    ir.DataType.INT2: (-2, 1),
}
"""Least and greatest number of the integer types one can quantize to."""

_BEYOND_EVERY_RANGE = 2.0**20
"""Numbers this large saturate whatever the zero point; cut here, rounding them never meets an infinity."""


@lowers("QuantizeLinear", domain=MICROSOFT)
@lowers("QuantizeLinear", since=10)
def quantize_linear(
    x: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
    element_types: tuple[int | None, ...],
    only_dequantized: bool,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html

    Gives the quantized values in float32 where they are only dequantized again.

    Raises:
        ValueError: scale and input do not fit together.
    """
    target = _find_target(y_zero_point, output_dtype, element_types)
    computing = TORCH_DTYPE[ir.DataType(precision)] if precision else y_scale.dtype
    if computing not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        computing = torch.float32
    scale = spread(y_scale.to(computing), x, axis, block_size)
    zero_point = None if y_zero_point is None else spread(y_zero_point.to(torch.float32), x, axis, block_size)
    scaled = (x.to(computing) / scale).to(torch.float32)
    if only_dequantized:
        return round_straight_through(scaled, zero_point, target)
    return _store(scaled, zero_point, target, bool(saturate))


def _find_target(zero_point: Tensor | None, output_dtype: int, element_types: tuple[int | None, ...]) -> ir.DataType:
    if output_dtype:
        return ir.DataType(output_dtype)
    if zero_point is None:
        return ir.DataType.UINT8
    return find_element_type(zero_point, element_types[2])


def spread(parameter: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """A scale or zero point in a shape that broadcasts to `x`.

    Args:
        parameter: of one element, or [x.shape[axis]], or in the shape of `x` with one element per block along `axis`.
        x: the tensor to quantize or dequantize.
        axis: the quantized axis.
        block_size: elements per block; 0: not in blocks.

    Raises:
        ValueError: the shapes do not fit.
    """
    if parameter.numel() == 1 and parameter.ndim < 2:
        return parameter.reshape(())
    if x.ndim == 1:
        axis = 0  # the default, 1, would be beyond a vector's only axis
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} is out of range for a tensor of rank {x.ndim}.")
    axis %= x.ndim
    if block_size:
        if parameter.ndim != x.ndim or parameter.shape[axis] * block_size < x.shape[axis]:
            raise ValueError(
                f"scale {list(parameter.shape)} with blocks of {block_size} along axis {axis} does not cover "
                f"{list(x.shape)}."
            )
        return parameter.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    if tuple(parameter.shape) != (x.shape[axis],):
        raise ValueError(
            f"scale is {list(parameter.shape)}; along axis {axis} of {list(x.shape)} it must be [{x.shape[axis]}]."
        )
    return parameter.reshape((1,) * axis + (-1,) + (1,) * (x.ndim - axis - 1))


def _store(scaled: Tensor, zero_point: Tensor | None, target: ir.DataType, saturate: bool) -> Tensor:
    """Rounds and saturates into the quantized type itself."""
    if target not in INTEGER_RANGE:
        return cast_to(scaled if zero_point is None else scaled + zero_point, target, saturate)
    quantized = torch.round(scaled) if zero_point is None else torch.round(scaled) + zero_point
    return torch.clamp(quantized, *INTEGER_RANGE[target]).to(TORCH_DTYPE[target])


def round_straight_through(scaled: Tensor, zero_point: Tensor | None, target: ir.DataType) -> Tensor:
    """Rounds and saturates in float32; the gradient is 1 where nothing saturates and 0 elsewhere."""
    if target in INTEGER_RANGE:
        scaled = torch.clamp(scaled, -_BEYOND_EVERY_RANGE, _BEYOND_EVERY_RANGE)
        rounded = scaled + (torch.round(scaled) - scaled).detach()
        return torch.clamp(rounded if zero_point is None else rounded + zero_point, *INTEGER_RANGE[target])
    if zero_point is not None:
        scaled = scaled + zero_point
    if target in SMALL_FLOATS:
        rounded = round_to_small_float(scaled.detach(), target)
    else:
        largest = torch.finfo(TORCH_DTYPE[target]).max
        scaled = torch.clamp(scaled, -largest, largest)
        rounded = cast_to(scaled.detach(), target).to(torch.float32)
    return _replace_value(scaled, rounded)


def _replace_value(carrier: Tensor, value: Tensor) -> Tensor:
    """`value`, with the gradient going to `carrier`."""
    return value.detach() + (carrier - carrier.detach())


@lowers("DequantizeLinear", domain=MICROSOFT)
@lowers("DequantizeLinear", since=10)
def dequantize_linear(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html; differentiable in the scale.

    Raises:
        ValueError: scale and input do not fit together.
    """
    result = TORCH_DTYPE[ir.DataType(output_dtype)] if output_dtype else x_scale.dtype
    if (
        block_size
        and x_zero_point is None
        and x_scale.ndim == x.ndim > 1
        and x_scale.shape[axis] * block_size == x.shape[axis]
    ):
        along = axis % x.ndim
        shape = (*x.shape[:along], -1, block_size, *x.shape[along + 1 :])
        blocks = x.reshape(shape).to(torch.float32)  # without a scale for every element
        return (blocks * x_scale.to(torch.float32).unsqueeze(along + 1)).reshape(x.shape).to(result)
    scale = spread(x_scale.to(torch.float32), x, axis, block_size)
    if x_zero_point is not None and x.dtype is torch.int32:
        x = x - spread(x_zero_point, x, axis, block_size)
    elif x_zero_point is not None:
        x = x.to(torch.float32) - spread(x_zero_point.to(torch.float32), x, axis, block_size)
    return (x.to(torch.float32) * scale).to(result)


@lowers("DynamicQuantizeLinear", since=11)
def dynamic_quantize_linear(x: Tensor, *, only_dequantized: bool, output_count: int) -> tuple[Tensor, Tensor, Tensor]:
    """https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear.html; to uint8, over the range of x and 0.

    Of zeros alone the scale is 1, as in onnxruntime; the standard's own formula divides by zero there. The gradient
    passes the rounding unchanged, and takes the range as given.
    """
    least, greatest = torch.clamp(x.detach().amin(), max=0), torch.clamp(x.detach().amax(), min=0)
    spacing = (greatest - least) / 255
    scale = torch.where(spacing == 0, 1.0, spacing)
    zero_point = torch.clamp(torch.round(-least / scale), 0, 255)
    if only_dequantized:
        y = round_straight_through(x / scale, zero_point, ir.DataType.UINT8)
    else:
        y = _store(x / scale, zero_point, ir.DataType.UINT8, True)
    return y, scale, zero_point.to(torch.uint8)

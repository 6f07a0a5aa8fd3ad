"""Changes of the element type: by value (Cast, CastLike) and by bits (BitCast)."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch
from torch import Tensor

from onward.lowering.kernels.dtypes import SMALL_FLOATS, TORCH_DTYPE, torch_dtype
from onward.lowering.registry import lowers

_SMALL_INTEGERS = {
    ir.DataType.INT4: (4, True),
    ir.DataType.UINT4: (4, False),
    ir.DataType.INT2: (2, True),
    ir.DataType.UINT2: (2, False),
}
"""Integers of fewer than 8 bits: bits, signed."""

_SMALL_FLOAT_FORMATS = {
    "FLOAT4E2M1": (1, 0, 6.0),
    "FLOAT6E2M3": (3, 0, 7.5),
    "FLOAT6E3M2": (2, -2, 28.0),
}
"""Floats of fewer than 8 bits: bits of the mantissa, smallest exponent, largest value. Source: OCP MX formats 1.0."""

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz})


@lowers("Cast", since=1)
def cast_before_6(input: Tensor, *, to: str) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Cast.html; the type is given by name."""
    return cast_to(input, ir.DataType[to.upper()])


@lowers("Cast", since=6)
def cast(input: Tensor, *, round_mode: str = "up", saturate: int = 1, to: int) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Cast.html; `saturate` is for float8, `round_mode` for float8e8m0."""
    return cast_to(input, ir.DataType(to), bool(saturate), round_mode)


@lowers("CastLike", since=15)
def cast_like(
    input: Tensor,
    target_type: Tensor,
    *,
    round_mode: str = "up",
    saturate: int = 1,
    element_types: tuple[int | None, ...],
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__CastLike.html; `saturate` is for float8, `round_mode` for float8e8m0."""
    return cast_to(input, find_element_type(target_type, element_types[1]), bool(saturate), round_mode)


@lowers("BitCast", since=26)
def bit_cast(input: Tensor, *, to: int, element_types: tuple[int | None, ...]) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__BitCast.html

    Raises:
        ValueError: the types differ in width.
    """
    source, target = find_element_type(input, element_types[0]), ir.DataType(to)
    if source.bitwidth != target.bitwidth:
        raise ValueError(
            f"{source.name} has {source.bitwidth} bits and {target.name} has {target.bitwidth}; "
            "the bits of one can only be read as the other if they are as many."
        )
    if source.bitwidth >= 8:
        return input.view(torch_dtype(target, "attribute 'to'"))
    bits = _float4_to_bits(input) if source is ir.DataType.FLOAT4E2M1 else input
    if target is ir.DataType.FLOAT4E2M1:
        return _bits_to_float4(bits)
    return _wrap(bits.to(torch.int64), *_SMALL_INTEGERS[target]).to(TORCH_DTYPE[target])


def find_element_type(tensor: Tensor, known: int | None) -> ir.DataType:
    """The ONNX type of a tensor: what the graph says, else the type that its torch dtype holds."""
    if known is not None:
        return ir.DataType(known)
    return next(data_type for data_type, dtype in TORCH_DTYPE.items() if dtype is tensor.dtype)


def cast_to(x: Tensor, target: ir.DataType, saturate: bool = True, round_mode: str = "up") -> Tensor:
    """Converts by value. Source: the tables in the text of Cast-28.

    Args:
        x: the tensor.
        target: the ONNX type.
        saturate: for float8: values beyond its range become its largest value, else infinity or NaN.
        round_mode: for float8e8m0: "up", "down" or "nearest".

    Raises:
        ModelError: torch has no such type.
    """
    dtype = torch_dtype(target, "attribute 'to'")
    if x.dtype.itemsize == 1 and x.dtype.is_floating_point:
        x = x.to(torch.float32)
    if dtype is torch.bool:
        return x != 0
    if target in _SMALL_INTEGERS:
        return _wrap(x.to(torch.int64), *_SMALL_INTEGERS[target]).to(dtype)
    if target is ir.DataType.FLOAT8E8M0:
        return _cast_to_power_of_two(x.to(torch.float32), saturate, round_mode)
    if target in SMALL_FLOATS:
        return round_to_small_float(x.to(torch.float32), target).to(dtype)
    if dtype in _FLOAT8 and saturate:
        # In float32: float16 cannot hold the largest value of every float8.
        largest = torch.finfo(dtype).max
        return torch.clamp(x if x.dtype is torch.float64 else x.to(torch.float32), -largest, largest).to(dtype)
    if dtype is torch.float8_e4m3fn and x.dtype.is_floating_point:
        # torch saturates here, unlike with the other float8 types; up to 464 is rounded to the largest value, 448.
        x = torch.where(x.abs() > 464, math.nan, x)
    return x.to(dtype)


def _wrap(x: Tensor, bits: int, signed: bool) -> Tensor:
    """Integers without their higher bits."""
    x = x & (2**bits - 1)
    return (x ^ 2 ** (bits - 1)) - 2 ** (bits - 1) if signed else x


def round_to_small_float(x: Tensor, target: ir.DataType) -> Tensor:
    """Rounded to the nearest value of a 4- or 6-bit float, ties to even; beyond it the largest, NaN to 0."""
    mantissa_bits, smallest_exponent, largest = _SMALL_FLOAT_FORMATS[target.name]
    x = torch.where(torch.isnan(x), 0.0, x).clamp(-largest, largest)
    exponent = torch.frexp(x.detach()).exponent - 1
    spacing = torch.exp2((exponent.clamp(min=smallest_exponent) - mantissa_bits).to(x.dtype))
    return torch.round(x / spacing) * spacing


def _cast_to_power_of_two(x: Tensor, saturate: bool, round_mode: str) -> Tensor:
    """float32 to float8e8m0, which is the exponent alone: code k stands for 2**(k - 127), 255 for NaN."""
    if round_mode not in ("up", "down", "nearest"):
        raise ValueError(f"round_mode is {round_mode!r}; it must be up, down or nearest.")
    # A float32 below 2**-126 has exponent bits 0 and counts in units of 2**-149; half of 2**-126 is 2**-127, code 0.
    bits = x.contiguous().view(torch.int32)
    code, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    unit = torch.where(code == 0, 0x400000, 0x800000)
    fraction = torch.where(code == 0, fraction - 0x400000, fraction)
    if round_mode == "up":
        code = code + (fraction > 0)
    elif round_mode == "nearest":
        code = code + (fraction * 2 >= unit)
    code = torch.where(torch.isinf(x), 255, code)
    code = code.clamp(max=254) if saturate else torch.where(x < 2.0**-127, 255, code)
    code = torch.where(torch.isnan(x), 255, code)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)


def _float4_values(device: torch.device) -> Tensor:
    return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)


def _float4_to_bits(x: Tensor) -> Tensor:
    """Codes 0 to 15 of float4e2m1 numbers held in float8."""
    values = x.to(torch.float32)
    magnitude = torch.searchsorted(_float4_values(x.device), values.abs().contiguous())
    return magnitude + 8 * torch.signbit(values)


def _bits_to_float4(bits: Tensor) -> Tensor:
    """float4e2m1 numbers, held in float8, of their codes."""
    codes = bits.to(torch.int64) & 15
    values = _float4_values(bits.device)[codes & 7]
    return torch.where(codes >= 8, -values, values).to(torch.float8_e4m3fn)

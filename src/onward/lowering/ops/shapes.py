"""Shapes read, and tensors made from them: Shape, Size, ConstantOfShape, Range, EyeLike, Trilu."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onward.lowering.kernels.dtypes import torch_dtype, wide_type
from onward.lowering.kernels.host import HostValue
from onward.lowering.kernels.host import flatten as numbers_of
from onward.lowering.ops.movement import move_bits
from onward.lowering.registry import lowers


@lowers("Shape", since=1, produces="host")
def shape(data: Tensor, *, start: int = 0, end: int | None = None) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Shape.html; version 15 on: a part of it, by Python's bounds."""
    return tuple(data.shape)[start:end]


@lowers("Size", since=1, produces="host")
def size(data: Tensor) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__Size.html"""
    return math.prod(data.shape)


@lowers("ConstantOfShape", since=9, host=("input",))
def constant_of_shape(input: HostValue, *, value: Tensor | None = None, device: torch.device) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__ConstantOfShape.html; float32 zeros without `value`."""
    sizes = numbers_of(input)
    if value is None:
        return torch.zeros(sizes, device=device)
    return value.reshape(()).expand(sizes)


@lowers("ConstantFill", host=("input",))
def constant_fill(
    input: HostValue | None = None,
    *,
    dtype: int = 1,
    extra_shape: tuple[int, ...] | None = None,
    input_as_shape: int = 0,
    shape: tuple[int, ...] | None = None,
    value: float = 0.0,
    device: torch.device,
) -> Tensor:
    """An experimental operator of ONNX 1.4 that torch's older exporter writes before opset 9, for states of zeros.

    The shape is `input`'s numbers, with `input_as_shape=1`, or `shape`, followed by `extra_shape`.
    """
    if input is not None and not input_as_shape:
        raise ValueError("ConstantFill in the shape of another tensor is not known; only of a given shape.")
    sizes = [*(numbers_of(input) if input is not None else shape or ()), *(extra_shape or ())]
    return torch.full(sizes, value, dtype=torch_dtype(dtype, "ConstantFill"), device=device)


@lowers("Range", since=11, host=("start", "limit", "delta"))
def range_(
    start: HostValue,
    limit: HostValue,
    delta: HostValue,
    *,
    stash_type: int = 1,
    device: torch.device,
    dtypes: tuple[torch.dtype | None, ...],
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Range.html; half floats are counted in float32."""
    first, last, step = (numbers_of(value)[0] for value in (start, limit, delta))
    if step == 0:
        raise ValueError("the delta of the range is 0.")
    known = next((dtype for dtype in dtypes if dtype is not None), None)
    dtype = known or (torch.float32 if isinstance(first, float) else torch.int64)
    # torch.arange refuses a range that runs backwards; the standard says it is empty.
    if (last - first) * (1 if step > 0 else -1) <= 0:
        return torch.empty(0, dtype=dtype, device=device)
    counted = wide_type(dtype)
    return torch.arange(first, last, step, dtype=counted, device=device).to(dtype)


@lowers("EyeLike", since=9)
def eye_like(input: Tensor, *, dtype: int | None = None, k: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__EyeLike.html; ones on the k-th diagonal."""
    if input.dim() != 2:
        raise ValueError(f"EyeLike takes a tensor of rank 2, got rank {input.dim()}.")
    rows = torch.arange(input.shape[0], device=input.device).unsqueeze(1)
    columns = torch.arange(input.shape[1], device=input.device)
    return (columns == rows + k).to(input.dtype if dtype is None else torch_dtype(dtype, "attribute 'dtype'"))


@lowers("Trilu", since=14, host=("k",))
def trilu(input: Tensor, k: HostValue = 0, *, upper: int = 1) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Trilu.html; keeps what is on and above (or below) the k-th diagonal."""
    diagonal = numbers_of(k)[0]
    return move_bits(lambda moved: moved.triu(diagonal) if upper else moved.tril(diagonal), input)

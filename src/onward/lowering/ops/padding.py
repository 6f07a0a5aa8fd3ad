"""Borders added and cut: Pad in every mode, CenterCropPad, and Col2Im, which adds overlapping blocks up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.host import HostValue
from onward.lowering.kernels.host import flatten as numbers_of
from onward.lowering.kernels.wide_gradients import with_wide_gradient
from onward.lowering.ops.movement import normalize_axes
from onward.lowering.passes import is_traced
from onward.lowering.registry import lowers

_TORCH_MODE = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@lowers("Pad", since=11, host=("pads", "constant_value", "axes"))
def pad(
    data: Tensor,
    pads: HostValue,
    constant_value: HostValue | None = None,
    axes: HostValue | None = None,
    *,
    mode: str = "constant",
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Pad.html; `axes` from 18 on, mode `wrap` from 19 on."""
    value = None if constant_value is None else numbers_of(constant_value)[0]
    along = None if axes is None else numbers_of(axes)
    return pad_axes(data, numbers_of(pads), along, mode, 0 if value is None else value)


@lowers("Pad", since=2)
def pad_2(data: Tensor, *, pads: tuple[int, ...], mode: str = "constant", value: float = 0.0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Pad.html; up to version 10 pads and value are attributes."""
    return pad_axes(data, pads, None, mode, value)


@lowers("Pad", since=1)
def pad_1(data: Tensor, *, paddings: tuple[int, ...], mode: str = "constant", value: float = 0.0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Pad.html; version 1 calls the pads `paddings`."""
    return pad_axes(data, paddings, None, mode, value)


def pad_axes(data: Tensor, pads: Sequence[int], axes: Sequence[int] | None, mode: str, value: float) -> Tensor:
    """Pads (or, where negative, cuts) each axis; `pads` holds all begins, then all ends.

    Raises:
        ValueError: the number of pads does not fit the axes, or the mode is not known.
    """
    rank = data.dim()
    along = tuple(range(rank)) if axes is None else normalize_axes(axes, rank)
    if len(pads) != 2 * len(along):
        raise ValueError(f"{len(pads)} pads for {len(along)} axes; a begin and an end for each is needed.")
    before, after = [0] * rank, [0] * rank
    for place, axis in enumerate(along):
        before[axis], after[axis] = pads[place], pads[place + len(along)]
    if mode == "constant":
        pairs = [amount for axis in reversed(range(rank)) for amount in (before[axis], after[axis])]
        return _pad_constant(data, pairs, value)
    if mode not in _TORCH_MODE:
        raise ValueError(f"mode {mode!r} is not known; expected constant, reflect, edge or wrap.")
    data = F.pad(data, [min(a, 0) for axis in reversed(range(rank)) for a in (before[axis], after[axis])])
    before, after = [max(amount, 0) for amount in before], [max(amount, 0) for amount in after]
    return with_wide_gradient(lambda tensor: _pad_with_own(tensor, before, after, mode), data)


def _pad_with_own(data: Tensor, before: Sequence[int], after: Sequence[int], mode: str) -> Tensor:
    """Padding with what is within, by amounts of each axis."""
    # Of gradients with the channels last, torch's compiler expects other strides than these kernels give them.
    if _fits_torch(data, before, after, mode) and not (is_traced() or torch.compiler.is_compiling()):
        pairs = [amount for axis in reversed(range(2, data.dim())) for amount in (before[axis], after[axis])]
        return F.pad(data, pairs, mode=_TORCH_MODE[mode])
    for axis in range(data.dim()):
        if before[axis] or after[axis]:
            data = data.index_select(axis, _source_positions(data, axis, before[axis], after[axis], mode))
    return data


def _pad_constant(data: Tensor, pairs: Sequence[int], value: float) -> Tensor:
    """Constant padding; unsigned types that torch cannot fill go through int64."""
    if not any(pairs):
        return data  # exporters pad every convolution; torch would copy
    if data.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return F.pad(data.to(torch.int64), list(pairs), value=value).to(data.dtype)
    return F.pad(data, list(pairs), value=value)


def _fits_torch(data: Tensor, before: Sequence[int], after: Sequence[int], mode: str) -> bool:
    """Whether torch's own kernels take it: floats, rank 3 to 5, space padded only, within the tensor's size."""
    if not data.is_floating_point() or not 3 <= data.dim() <= 5 or any((*before[:2], *after[:2])):
        return False
    if data.numel() == 0:
        return False
    spare = {"reflect": 1, "wrap": 0}.get(mode)
    if spare is None:
        return True
    return all(max(before[axis], after[axis]) <= data.shape[axis] - spare for axis in range(2, data.dim()))


def _source_positions(data: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    """For each position of the padded axis, the position of the tensor that it repeats."""
    size = data.shape[axis]
    if size == 0:
        raise ValueError(f"axis {axis} has size 0; mode {mode!r} has nothing to repeat there.")
    positions = torch.arange(-before, size + after, device=data.device)
    if mode == "edge":
        return positions.clamp(0, size - 1)
    if mode == "wrap":
        return positions.remainder(size)
    if size == 1:
        return torch.zeros_like(positions)
    period = 2 * (size - 1)
    positions = positions.remainder(period)  # of whose absolute value torch's compiler finds no bounds
    return torch.minimum(positions, period - positions)


@lowers("CenterCropPad", since=18, host=("shape",))
def center_crop_pad(input_data: Tensor, shape: HostValue, *, axes: tuple[int, ...] | None = None) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__CenterCropPad.html; an odd remainder goes to the end."""
    rank, wanted = input_data.dim(), numbers_of(shape)
    along = tuple(range(rank)) if axes is None else normalize_axes(axes, rank)
    before, after = [], []
    for axis, size in zip(along, wanted, strict=True):
        missing = size - input_data.shape[axis]
        first = missing // 2 if missing >= 0 else -((-missing) // 2)
        before.append(first)
        after.append(missing - first)
    return pad_axes(input_data, [*before, *after], along, "constant", 0)


@lowers("Col2Im", since=18, host=("image_shape", "block_shape"))
def col2im(
    input: Tensor,
    image_shape: HostValue,
    block_shape: HostValue,
    *,
    dilations: tuple[int, ...] | None = None,
    pads: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Col2Im.html; blocks of any rank, overlaps are added."""
    image, block = numbers_of(image_shape), numbers_of(block_shape)
    rank = len(image)
    dilations = dilations or (1,) * rank
    strides = strides or (1,) * rank
    pads = pads or (0,) * (2 * rank)
    if rank == 2 and pads[:2] == pads[2:]:
        return F.fold(input, tuple(image), tuple(block), dilations, pads[:2], strides)
    canvas = [size + pads[axis] + pads[axis + rank] for axis, size in enumerate(image)]
    place = torch.zeros((1, 1), dtype=torch.int64, device=input.device)
    for axis in range(rank):
        steps = (canvas[axis] - dilations[axis] * (block[axis] - 1) - 1) // strides[axis] + 1
        inside = torch.arange(block[axis], device=input.device) * dilations[axis]
        origin = torch.arange(steps, device=input.device) * strides[axis]
        # Row-major over (position in the block, block): each axis becomes the fastest one in turn.
        grid = inside.unsqueeze(1) + origin
        place = (
            (place.unsqueeze(1).unsqueeze(3) * canvas[axis] + grid.unsqueeze(0).unsqueeze(2)).flatten(2).flatten(0, 1)
        )
    batch, volume = input.shape[0], math.prod(block)
    channels = input.shape[1] // volume
    columns = input.reshape(batch, channels, -1)
    flat = columns.new_zeros(batch, channels, math.prod(canvas)).index_add(2, place.flatten(), columns)
    result = flat.reshape(batch, channels, *canvas)
    for axis, size in enumerate(image):
        result = result.narrow(2 + axis, pads[axis], size)
    return result

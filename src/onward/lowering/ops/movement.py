"""Tensors rearranged: reshaped, transposed, joined, cut, repeated. No arithmetic, and views wherever torch has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onward.lowering.kernels.host import HostValue
from onward.lowering.kernels.host import flatten as numbers_of
from onward.lowering.kernels.operands import REQUIRED, by_attributes
from onward.lowering.registry import lowers


def normalize_axis(axis: int, rank: int) -> int:
    """An axis in [-rank, rank) as one in [0, rank).

    Raises:
        ValueError: the axis is outside of that range.
    """
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} is out of range for a tensor of rank {rank}; expected {-rank} to {rank - 1}.")
    return axis + rank if axis < 0 else axis


def normalize_axes(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Distinct axes, each in [0, rank).

    Raises:
        ValueError: an axis is out of range or named twice.
    """
    normal = tuple(normalize_axis(axis, rank) for axis in axes)
    if len(set(normal)) != len(normal):
        raise ValueError(f"axes {tuple(axes)} name an axis of a rank-{rank} tensor twice.")
    return normal


_SAME_BITS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}


def move_bits(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Applies a function that only moves elements; types torch cannot move go as integers of that width."""
    dtype = tensors[0].dtype
    if dtype not in _SAME_BITS:
        return function(*tensors)
    return function(*(tensor.view(_SAME_BITS[dtype]) for tensor in tensors)).view(dtype)


@lowers("Identity")
def identity(input: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__Identity.html; tensors, sequences and optionals alike."""
    return input


@lowers("Reshape", since=5, host=("shape",))
def reshape(data: Tensor, shape: HostValue, *, allowzero: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Reshape.html; 0 copies a size unless `allowzero`, one -1 is inferred."""
    return data.reshape(resolve_shape(tuple(data.shape), numbers_of(shape), bool(allowzero)))


lowers("Reshape", since=1)(by_attributes(reshape, shape=()))


def resolve_shape(sizes: Sequence[int], target: Sequence[int], allowzero: bool) -> list[int]:
    """The target shape with copied sizes filled in; -1 is left to torch unless the tensor is empty.

    Raises:
        ValueError: 0 stands past the rank of the input, or -1 together with 0 under `allowzero`.
    """
    result, copied = list(target), set()
    for axis, size in enumerate(target):
        if isinstance(size, int) and size == 0 and not allowzero:
            if axis >= len(sizes):
                raise ValueError(f"shape {list(target)} copies axis {axis} of an input of rank {len(sizes)}.")
            result[axis] = sizes[axis]
            copied.add(axis)
    inferred = [axis for axis, size in enumerate(result) if isinstance(size, int) and size == -1]
    if inferred and any(isinstance(size, int) and size == 0 for size in (*result, *sizes)):
        if allowzero:
            raise ValueError(f"shape {list(target)} has -1 and 0 under allowzero=1: the size is not determined.")
        # Nothing to divide by: sizes copied on both sides cancel out.
        rest = math.prod(size for axis, size in enumerate(sizes) if axis not in copied)
        others = math.prod(size for axis, size in enumerate(result) if axis not in copied and axis not in inferred)
        result[inferred[0]] = rest // others if others else 0
    return result


@lowers("Transpose")
def transpose(data: Tensor, *, perm: tuple[int, ...] | None = None) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Transpose.html; without `perm` the axes are reversed."""
    return data.permute(tuple(reversed(range(data.dim()))) if perm is None else perm)


@lowers("Concat", since=4)
def concat(*inputs: Tensor, axis: int) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Concat.html"""
    return torch.cat(inputs, axis)


@lowers("Concat", since=1)
def concat_1(*inputs: Tensor, axis: int = 1) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Concat.html; up to version 3 the axis may be left out."""
    return torch.cat(inputs, axis)


def _split(input: Tensor, sizes: Sequence[int], axis: int) -> tuple[Tensor, ...]:
    total = input.shape[axis]
    if sum(sizes) != total:
        raise ValueError(f"parts {list(sizes)} add up to {sum(sizes)}, but axis {axis} has size {total}.")
    return torch.split(input, list(sizes), axis)


def _equal_parts(input: Tensor, count: int, axis: int) -> tuple[Tensor, ...]:
    total = input.shape[axis]
    if total % count:
        raise ValueError(f"axis {axis} of size {total} cannot be split into {count} equal parts.")
    return torch.split(input, total // count, axis) if total else (input,) * count


@lowers("Split", since=18, host=("split",))
def split(
    input: Tensor, split: HostValue | None = None, *, axis: int = 0, num_outputs: int | None = None, output_count: int
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__Split.html; with `num_outputs` the last part may be smaller."""
    if split is not None:
        return _split(input, numbers_of(split), axis)
    count, total = num_outputs or output_count, input.shape[axis]
    size = -(-total // count)
    sizes = [min(size, max(total - index * size, 0)) for index in range(count)]
    return torch.split(input, sizes, axis)


@lowers("Split", since=13, host=("split",))
def split_13(input: Tensor, split: HostValue | None = None, *, axis: int = 0, output_count: int) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__Split.html; up to version 17 parts without `split` are equal."""
    if split is not None:
        return _split(input, numbers_of(split), axis)
    return _equal_parts(input, output_count, axis)


@lowers("Split", since=2)
def split_2(
    input: Tensor, *, split: tuple[int, ...] | None = None, axis: int = 0, output_count: int
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__Split.html; up to version 12 `split` is an attribute."""
    return _equal_parts(input, output_count, axis) if split is None else _split(input, split, axis)


@lowers("Split", since=1, host=("split",))
def split_1(
    input: Tensor,
    split: HostValue | None = None,
    *,
    split_: tuple[int, ...] | None = None,
    axis: int = 0,
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__Split.html; version 1 knows `split` as input and as attribute."""
    sizes = numbers_of(split) if split is not None else split_
    return _equal_parts(input, output_count, axis) if sizes is None else _split(input, [int(s) for s in sizes], axis)


@lowers("Slice", since=10, host=("starts", "ends", "axes", "steps"))
def slice_(
    data: Tensor, starts: HostValue, ends: HostValue, axes: HostValue | None = None, steps: HostValue | None = None
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Slice.html; bounds are clamped, steps may be negative."""
    first, last = numbers_of(starts), numbers_of(ends)
    along = list(range(len(first))) if axes is None else numbers_of(axes)
    strides = [1] * len(first) if steps is None else numbers_of(steps)
    return slice_along(data, first, last, along, strides)


lowers("Slice", since=1)(by_attributes(slice_, starts=REQUIRED, ends=REQUIRED, axes=None))


def slice_along(
    data: Tensor, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Tensor:
    """Cuts `data` along several axes with Python's meaning of start, end and step."""
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ValueError(
            f"{len(starts)} starts, {len(ends)} ends, {len(axes)} axes and {len(steps)} steps do not match."
        )
    for start, end, axis, step in zip(starts, ends, normalize_axes(axes, data.dim()), steps, strict=True):
        if step == 0:
            raise ValueError(f"the step along axis {axis} is 0.")
        index = [slice(None)] * axis
        if step > 0:
            data = data[(*index, slice(start, end, step))]
            continue
        positions = range(data.shape[axis])[slice(start, end, step)]
        # torch cuts forwards only: the same elements in rising order, then turned around.
        rising = slice(positions[-1], positions[0] + 1, -step) if len(positions) else slice(0, 0)
        data = data[(*index, rising)].flip(axis)
    return data


@lowers("Squeeze", since=13, host=("axes",))
def squeeze(data: Tensor, axes: HostValue | None = None) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Squeeze.html; without axes all of size 1 go."""
    if axes is None:
        return data.squeeze()
    normal = normalize_axes(numbers_of(axes), data.dim())
    for axis in normal:
        if data.shape[axis] != 1:
            raise ValueError(f"axis {axis} has size {data.shape[axis]}; only axes of size 1 can be squeezed.")
    return data.squeeze(normal)


lowers("Squeeze", since=1)(by_attributes(squeeze, axes=None))


@lowers("Unsqueeze", since=13, host=("axes",))
def unsqueeze(data: Tensor, axes: HostValue) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Unsqueeze.html; axes count in the result."""
    along = numbers_of(axes)
    for axis in sorted(normalize_axes(along, data.dim() + len(along))):
        data = data.unsqueeze(axis)
    return data


lowers("Unsqueeze", since=1)(by_attributes(unsqueeze, axes=REQUIRED))


@lowers("Expand", since=8, host=("shape",))
def expand(input: Tensor, shape: HostValue) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Expand.html; input and shape broadcast both ways."""
    target = numbers_of(shape)
    sizes = [1] * (len(target) - input.dim()) + list(input.shape)
    target = [1] * (len(sizes) - len(target)) + target
    return input.expand([size if wanted == 1 else wanted for size, wanted in zip(sizes, target, strict=True)])


@lowers("Tile", since=6, host=("repeats",))
def tile(input: Tensor, repeats: HostValue) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Tile.html"""
    counts = numbers_of(repeats)
    if len(counts) != input.dim():
        raise ValueError(f"{len(counts)} repeats for a tensor of rank {input.dim()}; one for each axis is needed.")
    return input.repeat(counts)


@lowers("Tile", since=1, host=("tiles", "axis"))
def tile_1(input: Tensor, tiles: HostValue, axis: HostValue) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Tile.html; up to version 5 along one axis."""
    counts = [1] * input.dim()
    counts[int(numbers_of(axis)[0])] = int(numbers_of(tiles)[0])
    return input.repeat(counts)


@lowers("Flatten")
def flatten(input: Tensor, *, axis: int = 1) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Flatten.html; two axes remain: those before `axis`, and the rest."""
    rank = input.dim()
    if not -rank <= axis <= rank:
        raise ValueError(f"axis {axis} is out of range for a tensor of rank {rank}; expected {-rank} to {rank}.")
    at = axis + rank if axis < 0 else axis
    return input.reshape(math.prod(input.shape[:at]), math.prod(input.shape[at:]))


@lowers("ReverseSequence", since=10)
def reverse_sequence(input: Tensor, sequence_lens: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__ReverseSequence.html; turns the first `sequence_lens[i]` steps around."""
    if {batch_axis, time_axis} != {0, 1}:
        raise ValueError(f"batch_axis {batch_axis} and time_axis {time_axis} must be 0 and 1, in either order.")
    steps = torch.arange(input.shape[time_axis], device=input.device)
    lengths = sequence_lens.to(torch.int64).unsqueeze(-1)
    source = torch.where(steps < lengths, lengths - 1 - steps, steps)
    source = source if batch_axis == 0 else source.T
    return input.gather(time_axis, source.reshape(*source.shape, *[1] * (input.dim() - 2)).expand(input.shape))


@lowers("DepthToSpace", since=1)
def depth_to_space(input: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__DepthToSpace.html; DCR: depth outermost, CRD: innermost (pixel shuffle)."""
    batch, channels, *space = input.shape
    rank = len(space)
    inner = channels // blocksize**rank
    blocks = [blocksize] * rank
    # Axes: batch, then (block per axis, depth) or (depth, block per axis), then space.
    if mode == "DCR":
        split, depth, first = input.reshape(batch, *blocks, inner, *space), rank + 1, 1
    elif mode == "CRD":
        split, depth, first = input.reshape(batch, inner, *blocks, *space), 1, 2
    else:
        raise ValueError(f"mode {mode!r} is not known; expected 'DCR' or 'CRD'.")
    order = [0, depth]
    for axis in range(rank):
        order += [rank + 2 + axis, first + axis]
    return split.permute(order).reshape(batch, inner, *(size * blocksize for size in space))


@lowers("SpaceToDepth", since=1)
def space_to_depth(input: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__SpaceToDepth.html; from 28 on in both modes of DepthToSpace."""
    batch, channels, *space = input.shape
    rank = len(space)
    if any(size % blocksize for size in space):
        raise ValueError(f"space {list(space)} is not divisible by blocksize {blocksize}.")
    pairs = [part for size in space for part in (size // blocksize, blocksize)]
    split = input.reshape(batch, channels, *pairs)
    outer = [2 + 2 * axis for axis in range(rank)]
    blocks = [3 + 2 * axis for axis in range(rank)]
    if mode not in ("DCR", "CRD"):
        raise ValueError(f"mode {mode!r} is not known; expected 'DCR' or 'CRD'.")
    order = [0, *blocks, 1, *outer] if mode == "DCR" else [0, 1, *blocks, *outer]
    return split.permute(order).reshape(batch, channels * blocksize**rank, *(size // blocksize for size in space))

"""Elements picked by position: Gather and its kin, OneHot, NonZero, Compress. Negative positions count from the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from onward.lowering.kernels.embeddings import look_up, select
from onward.lowering.kernels.host import HostValue
from onward.lowering.kernels.host import flatten as numbers_of
from onward.lowering.ops.movement import move_bits, normalize_axis
from onward.lowering.passes import is_plain
from onward.lowering.registry import lowers
from onward.lowering.simplification import simplifies


def wrap_positions(indices: Tensor, size: int) -> Tensor:
    """Positions as int64, those below zero counted from the end of an axis of this size."""
    positions = indices.to(torch.int64)
    if _are_counted_from_the_start(positions):
        return positions  # no copy, which a backward pass would keep next to them
    return torch.where(positions < 0, positions + size, positions)


def flat_positions(coordinates: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Positions in axes of these sizes, flattened; beyond the last if a coordinate is beyond its axis.

    There is one tensor of coordinates for each axis; they are broadcast, and those below zero count from the end.
    """
    device = coordinates[0].device if coordinates else None
    position = torch.zeros((), dtype=torch.int64, device=device)
    is_outside = torch.zeros((), dtype=torch.bool, device=device)
    for size, coordinate in zip(sizes, coordinates, strict=True):
        along = wrap_positions(coordinate, size)
        position = position * size + along
        is_outside = is_outside | (along < 0) | (along >= size)
    return torch.where(is_outside, math.prod(sizes), position)


def _are_counted_from_the_start(positions: Tensor) -> bool:
    """Whether none is below zero, as far as the host knows without waiting; in a trace or a forecast it does not."""
    if positions.device.type != "cpu" or torch.compiler.is_compiling() or _len_torch_dispatch_stack():
        return False
    return is_plain(positions) and (not positions.numel() or int(positions.min()) >= 0)


@lowers("Gather", either=("indices",))
def gather(data: Tensor, indices: Tensor | int | tuple[Any, ...], *, axis: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Gather.html; a known single position is a view, and so are windows.

    Two ranges stand for the sums of their elements, the positions of windows.
    """
    axis = normalize_axis(axis, data.dim())
    if not isinstance(indices, Tensor):
        if not isinstance(indices, tuple):
            return data.select(axis, indices)
        if indices and isinstance(indices[0], range):
            return _windows(data, axis, *indices)
        indices = torch.tensor(indices, dtype=torch.int64, device=data.device)
    positions = wrap_positions(indices, data.shape[axis])
    if axis == 0 and data.dim() == 2 and data.is_floating_point():
        return look_up(data, positions)
    if positions.dim() == 1:
        return select(data, axis, positions)
    picked = select(data, axis, positions.reshape(-1))
    return picked.reshape((*data.shape[:axis], *positions.shape, *data.shape[axis + 1 :]))


@simplifies(gather)
def _with_known_positions(known: Mapping[str, Any], given: frozenset[str]) -> dict[str, Any]:
    """Positions of windows that follow each other, as torch exports `unfold`, need not be read one by one."""
    positions = known.get("indices")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or min(positions.shape) < 2:
        return {}
    start, across, along = (int(positions[place]) for place in ((0, 0), (1, 0), (0, 1)))
    across, along = across - start, along - start
    if start < 0 or across < 1 or along < 1:
        return {}
    rows, columns = positions.shape
    first, second = range(start, start + rows * across, across), range(0, columns * along, along)
    expected = torch.tensor(first)[:, None] + torch.tensor(second)
    return {"indices": (first, second)} if torch.equal(expected, positions.cpu()) else {}


def _windows(data: Tensor, axis: int, first: range, second: range) -> Tensor:
    """The elements at the sums of two ranges, along an axis that becomes two; a view.

    Raises:
        IndexError: a position is beyond the axis.
    """
    reach = first[-1] - first[0] + 1
    size = reach + second[-1]
    if first[0] + size > data.shape[axis]:
        raise IndexError(f"index {first[0] + size - 1} is out of range for an axis of size {data.shape[axis]}.")
    windows = data.narrow(axis, first[0], size).unfold(axis, reach, second.step)
    return windows[..., :: first.step].movedim(-1, axis)


@lowers("GatherElements", since=11)
def gather_elements(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__GatherElements.html"""
    axis = normalize_axis(axis, data.dim())
    positions = wrap_positions(indices, data.shape[axis])
    return move_bits(lambda moved: moved.gather(axis, positions), data)


@lowers("GatherND", since=11)
def gather_nd(data: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__GatherND.html; the last axis of `indices` holds coordinates."""
    leading = tuple(data.shape[:batch_dims])
    if leading != tuple(indices.shape[:batch_dims]):
        raise ValueError(
            f"the first {batch_dims} axes of data {list(data.shape)} and indices {list(indices.shape)} differ."
        )
    depth = indices.shape[-1]
    if batch_dims + depth > data.dim():
        raise ValueError(f"coordinates of length {depth} after {batch_dims} batch axes exceed rank {data.dim()}.")
    coordinates: list[Tensor] = []
    for axis, size in enumerate(leading):
        grid = torch.arange(size, device=data.device)
        coordinates.append(grid.reshape(-1, *[1] * (indices.dim() - 2 - axis)))
    coordinates += indices.unbind(-1)
    sizes, rest = data.shape[: len(coordinates)], data.shape[len(coordinates) :]
    rows = flat_positions(coordinates, sizes).expand(indices.shape[:-1])
    # Not data[coordinates], whose gradient on a CPU is summed up in another order each time.
    picked = select(data.reshape(math.prod(sizes), *rest), 0, rows.reshape(-1))
    return picked.reshape(*rows.shape, *rest)


@lowers("OneHot", since=9, host=("depth",))
def one_hot(indices: Tensor, depth: HostValue, values: Tensor, *, axis: int = -1) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__OneHot.html; `values` is (off, on); positions out of range stay off."""
    count = int(numbers_of(depth)[0])
    axis = normalize_axis(axis, indices.dim() + 1)
    positions = wrap_positions(indices, count).unsqueeze(axis)
    classes = torch.arange(count, device=indices.device).reshape(-1, *[1] * (indices.dim() - axis))
    return torch.where(positions == classes, values[1], values[0])


@lowers("NonZero", since=9)
def non_zero(X: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__NonZero.html; one row for each axis, (0, N) for a rank-0 tensor."""
    return torch.nonzero(X if X.dtype in (torch.bool, torch.float32) else X != 0).T


@lowers("Compress", since=9)
def compress(input: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Compress.html; a condition that is too short keeps nothing of the rest."""
    if axis is None:
        input, axis = input.reshape(-1), 0
    return input.index_select(axis, torch.nonzero(condition.reshape(-1)).reshape(-1))

"""Elements picked by position: Gather and its kin, OneHot, NonZero, Compress. Negative positions count from the end."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.host import HostValue
from onward.lowering.kernels.host import flatten as numbers_of
from onward.lowering.ops.movement import move_bits, normalize_axis
from onward.lowering.registry import lowers


def wrap_positions(indices: Tensor, size: int) -> Tensor:
    """Positions as int64, those below zero counted from the end of an axis of this size."""
    positions = indices.to(torch.int64)
    return torch.where(positions < 0, positions + size, positions)


@lowers("Gather", either=("indices",))
def gather(data: Tensor, indices: Tensor | int | tuple[Any, ...], *, axis: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Gather.html; a known single position is a view."""
    axis = normalize_axis(axis, data.dim())
    if not isinstance(indices, Tensor):
        if not isinstance(indices, tuple):
            return data.select(axis, indices)
        indices = torch.tensor(indices, dtype=torch.int64, device=data.device)
    positions = wrap_positions(indices, data.shape[axis])
    if axis == 0 and data.dim() == 2 and data.is_floating_point():
        return F.embedding(positions, data)
    if positions.dim() == 1:
        return data.index_select(axis, positions)
    picked = data.index_select(axis, positions.reshape(-1))
    return picked.reshape((*data.shape[:axis], *positions.shape, *data.shape[axis + 1 :]))


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
    coordinates += indices.to(torch.int64).unbind(-1)
    return data[tuple(coordinates)]


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

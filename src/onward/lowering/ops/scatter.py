"""Elements written by position: ScatterElements, ScatterND and TensorScatter, with all their reductions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onward.lowering.ops.indexing import flat_positions, wrap_positions
from onward.lowering.ops.movement import move_bits, normalize_axis
from onward.lowering.registry import lowers

_TORCH_REDUCTION = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@lowers("Scatter", since=9)
def scatter(data: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Scatter.html; the older name of ScatterElements."""
    return scatter_elements(data, indices, updates, axis=axis)


@lowers("ScatterElements", since=11)
def scatter_elements(
    data: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__ScatterElements.html; add and mul from 16 on, max and min from 18 on."""
    axis = normalize_axis(axis, data.dim())
    return _scatter_reduce(data, axis, wrap_positions(indices, data.shape[axis]), updates, reduction)


def _scatter_reduce(data: Tensor, axis: int, positions: Tensor, updates: Tensor, reduction: str) -> Tensor:
    """`torch.scatter` or `torch.scatter_reduce`; types that torch cannot reduce go through int64."""
    data, updates = _of_one_type(data, updates)
    if reduction == "none":
        return move_bits(lambda moved, written: moved.scatter(axis, positions, written), data, updates)
    if reduction not in _TORCH_REDUCTION:
        raise ValueError(f"reduction {reduction!r} is not known; expected none, add, mul, max or min.")
    if data.dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64):
        wide = _scatter_reduce(data.to(torch.int64), axis, positions, updates.to(torch.int64), reduction)
        return wide.to(data.dtype)
    return data.scatter_reduce(axis, positions, updates, _TORCH_REDUCTION[reduction], include_self=True)


def _of_one_type(data: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider type: autocast leaves some values in 16 bits and others not, which torch's kernels refuse."""
    if data.dtype == updates.dtype:
        return data, updates
    wider = torch.promote_types(data.dtype, updates.dtype)
    return data.to(wider), updates.to(wider)


@lowers("ScatterND", since=11)
def scatter_nd(data: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__ScatterND.html; the last axis of `indices` holds coordinates of slices."""
    depth = indices.shape[-1]
    if depth > data.dim():
        raise ValueError(f"coordinates of length {depth} exceed the rank of data {list(data.shape)}.")
    data, updates = _of_one_type(data, updates)
    rows = flat_positions(indices.unbind(-1), data.shape[:depth]).expand(indices.shape[:-1]).reshape(-1)
    width = math.prod(data.shape[depth:])
    flat, written = data.reshape(-1, width), updates.reshape(-1, width)
    if reduction == "none":
        copied = move_bits(lambda old, new: old.index_copy(0, rows, new), flat, written)
        return copied.reshape(data.shape)
    if reduction == "add" and data.is_floating_point():
        return flat.index_add(0, rows, written).reshape(data.shape)
    positions = rows.unsqueeze(-1).expand(-1, width)
    return _scatter_reduce(flat, 0, positions, written, reduction).reshape(data.shape)


@lowers("TensorScatter", since=24)
def tensor_scatter(
    past_cache: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__TensorScatter.html; writes each sample's update at its own place."""
    axis = normalize_axis(axis, past_cache.dim())
    if axis == 0:
        raise ValueError("axis 0 is the batch; the sequence must be on another axis.")
    steps = torch.arange(update.shape[axis], device=update.device)
    if write_indices is None:
        positions = steps.expand(update.shape[0], -1)
    else:
        positions = write_indices.to(torch.int64).unsqueeze(-1) + steps
    if mode == "circular":
        positions = positions.remainder(past_cache.shape[axis])
    elif mode != "linear":
        raise ValueError(f"mode {mode!r} is not known; expected 'linear' or 'circular'.")
    shape = [1] * update.dim()
    shape[0], shape[axis] = positions.shape
    return _scatter_reduce(past_cache, axis, positions.reshape(shape).expand(update.shape), update, "none")

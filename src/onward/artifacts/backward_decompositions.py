"""Backward operators that ONNX has no counterpart of, written with operators that it has.

Each is a decomposition as torch's tracer takes them: the ATen operator's arguments in, its results out. All sizes may
be symbolic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from onward.artifacts.convolution_gradients import (
    convolution,
    convolution_backward,
    missing_rows,
    per_axis,
    transposed_convolution,
)
from onward.artifacts.normalization_decompositions import normalization_decompositions

aten = torch.ops.aten

_TORCH_WRITES_OUT = (
    # The exporter translates these, but not all their results: a backward pass needs the rest.
    aten.nll_loss_forward,
    aten.nll_loss2d_forward,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten.native_group_norm,
    aten.nll_loss_backward,
    aten.nll_loss2d_backward,
    aten.native_batch_norm_backward,
    aten.native_group_norm_backward,
    aten.silu_backward,
    aten.mish_backward,
)


def _max_pool_backward(
    axes: int,
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Every gradient goes to the place of the maximum, of equal ones to the first."""
    kernel, padding, dilation = (per_axis(values, axes) for values in (kernel_size, padding, dilation))
    sizes, windows = list(self.shape[-axes:]), grad_output.shape[-axes:]
    is_disjoint = kernel == (per_axis(stride, axes) if stride else kernel) and not any(padding)
    covered = [count * size for count, size in zip(windows, kernel, strict=True)]
    if is_disjoint and set(dilation) == {1} and all(isinstance(size, int) for size in sizes):
        missing = [size - read for size, read in zip(sizes, covered, strict=True)]
        if min(missing) >= 0:
            read = self
            for axis, size in enumerate(covered, start=-axes):
                read = read.narrow(axis, 0, size)
            found = _of_disjoint_windows(grad_output, read, kernel)
            pads = [pad for size in reversed(missing) for pad in (0, size)]
            return aten.constant_pad_nd(found, pads, 0.0) if any(pads) else found
    planes = self.shape[: self.dim() - axes]
    flat = torch.zeros(*planes, math.prod(sizes), dtype=grad_output.dtype, device=grad_output.device)
    added = flat.scatter_add(-1, indices.flatten(-axes), grad_output.flatten(-axes))
    return added.reshape(self.shape)


def _of_disjoint_windows(gradient: Tensor, x: Tensor, kernel: Sequence[int], axis: int = -1) -> Tensor:
    """The gradient of maxima over windows of a size along each of the last axes, found by comparing their elements.

    It reads no indices: in onnxruntime a pooling that gives them takes ten times as long as one that does not, and
    adding at indices (`ScatterElements`) longer than this.
    """
    if not kernel:
        return gradient
    *outer, size = kernel
    if axis == -1:  # a transposed matrix is faster than every second element
        shape = [*x.shape[:-1], x.shape[-1] // size]
        elements = list(x.reshape(-1, size).t().reshape(size, *shape).unbind(0))
    else:
        place = x.dim() + axis
        rows = x.reshape(*x.shape[:place], x.shape[axis] // size, size, *x.shape[place + 1 :])
        elements = list(rows.unbind(axis))
    largest = elements[-1:]  # from each element to the end
    for element in reversed(elements[:-1]):
        largest.insert(0, torch.maximum(element, largest[0]))
    rest, found = _of_disjoint_windows(gradient, largest[0], outer, axis - 1), list[Tensor]()
    for element, later in zip(elements[:-1], largest[1:], strict=True):
        moved = rest * _is_above(later - element, 0)
        found.append(rest - moved)
        rest = moved
    return torch.stack([*found, rest], axis).reshape(x.shape)


def avg_pool_backward(
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Every gradient, divided as its window was, goes to all places of the window: a transposed convolution of ones."""
    axes = len(kernel_size) if len(kernel_size) > 1 else (2 if self.dim() < 5 else 3)
    kernel, padding = per_axis(kernel_size, axes), per_axis(padding, axes)
    stride = per_axis(stride, axes) if stride else kernel
    sizes, windows = self.shape[-axes:], grad_output.shape[-axes:]
    shares = grad_output
    for axis in range(axes):
        count = _window_sizes(sizes[axis], windows[axis], kernel[axis], stride[axis], padding[axis], count_include_pad)
        if divisor_override is None:
            shape = [1] * axes
            shape[axis] = -1
            shares = shares / count.to(device=self.device, dtype=grad_output.dtype).reshape(shape)
    if divisor_override is not None:
        shares = shares / divisor_override
    more = missing_rows(sizes, windows, kernel, stride, padding, [1] * axes)
    ones = torch.ones(1, 1, *kernel, dtype=grad_output.dtype, device=grad_output.device)
    planes = shares.reshape(-1, 1, *windows)
    spread = transposed_convolution(planes, ones, stride, padding, [1] * axes, more, 1)
    return spread.reshape(self.shape)


def _window_sizes(size: Any, windows: Any, kernel: int, stride: int, padding: int, include_pad: bool) -> Tensor:
    """How many rows each window of an axis divides by: padding counts with `include_pad`, what is beyond it never."""
    starts = torch.arange(windows) * stride - padding
    ends = (starts + kernel).clamp(max=size + padding)
    if not include_pad:
        starts, ends = starts.clamp(min=0), ends.clamp(max=size)
    return ends - starts


def _is_above(values: Tensor, bound: float) -> Tensor:
    """1 where a value is above the bound and 0 elsewhere, in the values' type, by arithmetic.

    A choice by a condition (`Where`), or a condition as numbers (`Cast`), take four times as long in onnxruntime.
    """
    above, largest = values - bound if bound else values, torch.finfo(values.dtype).max
    if values.dtype is torch.float16:  # whose smallest number times its largest is far below 1
        above = (above * largest).clamp(0, 1)
    return (above * largest).clamp(0, 1)


def threshold_backward(grad_output: Tensor, self: Tensor, threshold: float) -> Tensor:
    """Of ReLU, and of a threshold other than 0."""
    return grad_output * _is_above(self, threshold)


def hardtanh_backward(grad_output: Tensor, self: Tensor, min_val: float, max_val: float) -> Tensor:
    """Of a value that is kept between two bounds, as ReLU6 does."""
    inside = (self - min_val if min_val else self) * (max_val - self)
    return grad_output * _is_above(inside, 0)


def backward_decompositions(may_be_infinite: bool = False) -> Mapping[Any, Callable[..., Any]]:
    """ATen operator -> its decomposition: torch's own where it has one, above where ONNX lacks the operator.

    Args:
        may_be_infinite: gradients may be, where an activation is clipped: a product with 0 would be NaN.
    """
    masks: dict[Any, Callable[..., Any]] = {
        aten.threshold_backward.default: threshold_backward,
        aten.hardtanh_backward.default: hardtanh_backward,
    }
    return {
        **get_decompositions(_TORCH_WRITES_OUT),
        **normalization_decompositions(),
        aten.convolution.default: convolution,
        aten.convolution_backward.default: convolution_backward,
        aten.max_pool2d_with_indices_backward.default: functools.partial(_max_pool_backward, 2),
        aten.max_pool3d_with_indices_backward.default: functools.partial(_max_pool_backward, 3),
        aten.avg_pool2d_backward.default: avg_pool_backward,
        aten.avg_pool3d_backward.default: avg_pool_backward,
        **(get_decompositions(list(masks)) if may_be_infinite else masks),
    }


def _slice_scatter(input: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    if not input.is_complex():
        return NotImplemented
    pairs, new = torch.view_as_real(input), torch.view_as_real(src)
    found: Tensor = torch.view_as_complex(aten.slice_scatter(pairs, new, dim % input.dim(), start, end, step))
    return found


def _new_zeros(input: Tensor, size: Sequence[Any], **options: Any) -> Any:
    if not input.is_complex() or options.get("dtype") is not None:
        return NotImplemented
    found: Tensor = torch.view_as_complex(aten.new_zeros(torch.view_as_real(input), [*size, 2]))
    return found


def _copy(input: Tensor, src: Tensor, non_blocking: bool = False) -> Any:
    return src.clone() if input.is_complex() and input.shape == src.shape else NotImplemented


COMPLEX_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.slice_scatter.default: _slice_scatter,
        aten.new_zeros.default: _new_zeros,
        aten.copy.default: _copy,
    }
)
"""Of operators that the exporter writes for real numbers alone, for pairs of real ones: the backward passes of Fourier
transforms of real numbers cut, extend and double a part of a spectrum."""

"""Backward operators that ONNX has no counterpart of, written with operators that it has.

Each is a decomposition as torch's tracer takes them: the ATen operator's arguments in, its results out. All sizes may
be symbolic.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

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


_FEWEST_CHANNELS = 16
"""With fewer, the columns of a matrix product would be too few to be fast."""

_MOST_OFFSETS = 25
"""Larger kernels would make graphs of hundreds of nodes."""

_SHORTEST_ROW, _LONGEST_ROW = 8, 64
"""Of outputs of depthwise convolutions: products of shorter ones are too small, of longer ones too large."""


def _per_axis(values: Sequence[int], axes: int) -> list[int]:
    """One number for each axis; ATen takes a single one for all."""
    return list(values) * axes if len(values) == 1 else list(values)


def _missing_rows(
    size: Any, reduced: Any, kernel: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[Any]:
    """For each axis, by how much a transposed convolution of the result falls short of the input's size."""
    return [
        i - ((o - 1) * s - 2 * p + d * (k - 1) + 1)
        for i, o, k, s, p, d in zip(size, reduced, kernel, stride, padding, dilation, strict=True)
    ]


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a convolution as convolutions (Dumoulin & Visin 2016, arXiv 1603.07285, chapter 4).

    For the input: the transposed convolution of the output's gradient. For the weight (O, I/G, K): the input and the
    output's gradient, batch and channels swapped, convolved with stride and dilation swapped; or, where that is
    faster, matrix products. A transposed convolution swaps the two roles.
    """
    axes = input.dim() - 2
    stride, padding, dilation = (_per_axis(values, axes) for values in (stride, padding, dilation))
    zeros = [0] * axes
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        if transposed:
            grad_input = aten.convolution(grad_output, weight, None, stride, padding, dilation, False, zeros, groups)
            for axis, size in enumerate(input.shape[2:], start=2):  # output_padding of a stride or more reads nothing
                grad_input = grad_input.narrow(axis, 0, size)
        elif groups == 1 and set(weight.shape[2:]) == set(stride) == {1} and not any(padding):
            swapped = weight.transpose(0, 1)
            grad_input = aten.convolution(grad_output, swapped, None, stride, zeros, dilation, False, zeros, 1)
        else:
            more = _missing_rows(input.shape[2:], grad_output.shape[2:], weight.shape[2:], stride, padding, dilation)
            grad_input = _transposed_convolution(grad_output, weight, stride, padding, dilation, more, groups)
    if output_mask[1]:
        wide, narrow = (grad_output, input) if transposed else (input, grad_output)
        kernel = weight.shape[2:]
        if groups == 1 and wide.shape[1] >= _FEWEST_CHANNELS and math.prod(kernel) <= _MOST_OFFSETS:
            grad_weight = _weight_gradient_by_offset(wide, narrow, kernel, stride, padding, dilation)
        elif _is_depthwise_of_rows(wide, narrow, groups):
            grad_weight = _weight_gradient_by_rows(wide, narrow, kernel, stride, padding, dilation)
        else:
            grad_weight = _weight_gradient(wide, narrow, kernel, stride, padding, dilation, groups)
    if output_mask[2]:
        grad_bias = grad_output.sum([0, *range(2, grad_output.dim())])
    return grad_input, grad_weight, grad_bias


def _transposed_convolution(
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    more: list[Any],
    groups: int,
) -> Tensor:
    """A transposed convolution whose result is larger by `more` rows at the end of each axis."""
    if all(isinstance(m, int) and 0 <= m < max(s, d) for m, s, d in zip(more, stride, dilation, strict=True)):
        return aten.convolution(x, weight, None, stride, padding, dilation, True, more, groups)  # type: ignore[no-any-return]
    # Without padding the result covers every row that a window touched; the rest is cut off or is zero.
    zeros = [0] * len(stride)
    full = aten.convolution(x, weight, None, stride, zeros, dilation, True, zeros, groups)
    pads: list[Any] = []
    for p, m in zip(reversed(padding), reversed(more), strict=True):
        pads += [-p, m - p]
    return aten.constant_pad_nd(full, pads, 0.0)  # type: ignore[no-any-return]


def _weight_gradient(
    wide: Tensor,
    narrow: Tensor,
    kernel: Sequence[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """The gradient (channels of narrow, channels of wide / groups, kernel) of a weight that maps `wide` to `narrow`."""
    batch, channels = wide.shape[:2]
    inside = channels // groups
    x = wide.reshape(batch, groups, inside, *wide.shape[2:]).transpose(0, 2)
    x = x.reshape(inside, groups * batch, *wide.shape[2:])
    filters = narrow.transpose(0, 1)
    zeros = [0] * len(stride)
    found = aten.convolution(x, filters, None, dilation, padding, stride, False, zeros, groups)
    # Rows of the input that no window reached give the result more places than the kernel has.
    for axis, size in enumerate(kernel, start=2):
        found = found.narrow(axis, 0, size)
    return found.transpose(0, 1)  # type: ignore[no-any-return]


def _weight_gradient_by_offset(
    wide: Tensor,
    narrow: Tensor,
    kernel: Sequence[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    """As `_weight_gradient` without groups: for each place of the kernel, one matrix product over batch and windows.

    A convolution with the output's gradient as its kernel has as many columns as the kernel has places, which is few:
    in onnxruntime on a CPU this form takes 0.1 to 0.9 of its time.
    """
    pads = [p for size in reversed(padding) for p in (size, size)]
    rows = (aten.constant_pad_nd(wide, pads, 0.0) if any(padding) else wide).transpose(0, 1)
    gradients = narrow.transpose(0, 1).flatten(1)
    found = []
    for place in itertools.product(*map(range, kernel)):
        read = rows
        for axis, (at, windows, s, d) in enumerate(zip(place, narrow.shape[2:], stride, dilation, strict=True), 2):
            read = aten.slice(read, axis, at * d, at * d + (windows - 1) * s + 1, s)
        found.append(gradients @ read.flatten(1).t())
    return torch.stack(found, -1).reshape(narrow.shape[1], wide.shape[1], *kernel)


def _is_depthwise_of_rows(wide: Tensor, narrow: Tensor, groups: int) -> bool:
    """Whether each channel of images of known size has a kernel, and rows are neither too short nor too long."""
    sizes = (*wide.shape[2:], *narrow.shape[2:])
    return (
        wide.dim() == 4
        and groups == wide.shape[1] == narrow.shape[1]
        and all(isinstance(size, int) for size in sizes)
        and _SHORTEST_ROW <= sizes[-1] <= _LONGEST_ROW
    )


def _weight_gradient_by_rows(
    wide: Tensor,
    narrow: Tensor,
    kernel: Sequence[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    """As `_weight_gradient` with a group for each channel.

    For each row of the kernel, the product of all columns of the output's gradient and of the input, summed over rows;
    of which those pairs count that a column of the kernel joins. This multiplies more than a convolution does, and
    takes a quarter to a half of its time in onnxruntime on a CPU, which calls a matrix product for each channel.
    """
    rows, columns = wide.shape[2:]
    windows, width = narrow.shape[2:]
    found = []
    for place in range(kernel[0]):
        offset, step = place * dilation[0] - padding[0], stride[0]
        first = max(0, -(offset // step))
        end = max(first, min(windows, (rows - 1 - offset) // step + 1))
        if first == end:  # runtimes refuse a product over no rows
            found.append(wide.new_zeros(wide.shape[1], width * columns))
            continue
        read = aten.slice(wide, 2, max(0, first * step + offset), max(0, (end - 1) * step + offset + 1), step)
        products = aten.slice(narrow, 2, first, end).transpose(-1, -2) @ read
        found.append(products.sum(0).flatten(1))
    joined = torch.arange(width)[:, None, None] * stride[1] + torch.arange(kernel[1]) * dilation[1] - padding[1]
    counts = (torch.arange(columns)[None, :, None] == joined).to(wide.device, wide.dtype)
    gradients = torch.stack(found) @ counts.reshape(width * columns, kernel[1])
    return gradients.transpose(0, 1).unsqueeze(1)


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
    kernel, padding, dilation = (_per_axis(values, axes) for values in (kernel_size, padding, dilation))
    sizes, windows = list(self.shape[-axes:]), grad_output.shape[-axes:]
    is_disjoint = kernel == (_per_axis(stride, axes) if stride else kernel) and not any(padding)
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
    kernel, padding = _per_axis(kernel_size, axes), _per_axis(padding, axes)
    stride = _per_axis(stride, axes) if stride else kernel
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
    more = _missing_rows(sizes, windows, kernel, stride, padding, [1] * axes)
    ones = torch.ones(1, 1, *kernel, dtype=grad_output.dtype, device=grad_output.device)
    planes = shares.reshape(-1, 1, *windows)
    spread = _transposed_convolution(planes, ones, stride, padding, [1] * axes, more, 1)
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

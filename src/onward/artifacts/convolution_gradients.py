"""Gradients of convolutions, and small ones themselves, by the form that is fastest in onnxruntime on a CPU.

All sizes may be symbolic, but for the forms that say so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

_FEWEST_CHANNELS = 16
"""With fewer, the columns of a matrix product would be too few to be fast."""

_MOST_OFFSETS = 25
"""Larger kernels would make graphs of hundreds of nodes."""

_LONGEST_ROW = 64
"""Of outputs of depthwise convolutions: products of longer ones are too large."""

_MOST_PAIRS = 40_000
"""Pairs of places of two planes, times the places of the kernel, up to which all pairs are multiplied."""


class _Windows(NamedTuple):
    """How a kernel moves over a plane: one number for each axis."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]


def per_axis(values: Sequence[int], axes: int) -> list[int]:
    """One number for each axis; ATen takes a single one for all."""
    return list(values) * axes if len(values) == 1 else list(values)


def missing_rows(
    size: Any, reduced: Any, kernel: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[Any]:
    """For each axis, by how much a transposed convolution of the result falls short of the input's size."""
    return [
        i - ((o - 1) * s - 2 * p + d * (k - 1) + 1)
        for i, o, k, s, p, d in zip(size, reduced, kernel, stride, padding, dilation, strict=True)
    ]


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Of small planes with a kernel for each channel, matrix products; the gradients share their matrices."""
    if transposed or not _is_depthwise(input, weight.shape[0], groups):
        return NotImplemented
    windows = _Windows(weight.shape[2:], *(per_axis(values, 2) for values in (stride, padding, dilation)))
    sizes = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in zip(input.shape[2:], *windows, strict=True)
    ]
    if not _is_small(input.shape[2:], sizes, windows.kernel):
        return NotImplemented
    matrices = _kernel_matrices(weight, input.shape[2:], sizes, windows)
    found = (_planes_by_channel(input) @ matrices.transpose(1, 2)).transpose(0, 1)
    found = found.reshape(input.shape[0], input.shape[1], *sizes)
    return found if bias is None else found + bias.reshape(-1, 1, 1)


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
    stride, padding, dilation = (per_axis(values, axes) for values in (stride, padding, dilation))
    zeros = [0] * axes
    grad_input = grad_weight = grad_bias = None
    wide, narrow = (grad_output, input) if transposed else (input, grad_output)
    windows = _Windows(weight.shape[2:], stride, padding, dilation)
    is_depthwise = _is_depthwise(wide, narrow.shape[1], groups)
    is_small = is_depthwise and _is_small(wide.shape[2:], narrow.shape[2:], windows.kernel)
    if output_mask[0]:
        if transposed:
            grad_input = aten.convolution(grad_output, weight, None, stride, padding, dilation, False, zeros, groups)
            for axis, size in enumerate(input.shape[2:], start=2):  # output_padding of a stride or more reads nothing
                grad_input = grad_input.narrow(axis, 0, size)
        elif groups == 1 and set(weight.shape[2:]) == set(stride) == {1} and not any(padding):
            swapped = weight.transpose(0, 1)
            grad_input = aten.convolution(grad_output, swapped, None, stride, zeros, dilation, False, zeros, 1)
        elif is_small:
            grad_input = _input_gradient_by_plane(input, grad_output, weight, windows)
        else:
            more = missing_rows(input.shape[2:], grad_output.shape[2:], weight.shape[2:], stride, padding, dilation)
            grad_input = transposed_convolution(grad_output, weight, stride, padding, dilation, more, groups)
    if output_mask[1]:
        if groups == 1 and wide.shape[1] >= _FEWEST_CHANNELS and math.prod(windows.kernel) <= _MOST_OFFSETS:
            grad_weight = _weight_gradient_by_offset(wide, narrow, windows)
        elif is_small:
            grad_weight = _weight_gradient_by_plane(wide, narrow, windows)
        elif is_depthwise and narrow.shape[-1] <= _LONGEST_ROW:
            grad_weight = _weight_gradient_by_rows(wide, narrow, windows)
        else:
            grad_weight = _weight_gradient(wide, narrow, windows, groups)
    if output_mask[2]:
        grad_bias = grad_output.sum([0, *range(2, grad_output.dim())])
    return grad_input, grad_weight, grad_bias


def transposed_convolution(
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


def _weight_gradient(wide: Tensor, narrow: Tensor, windows: _Windows, groups: int) -> Tensor:
    """The gradient (channels of narrow, channels of wide / groups, kernel) of a weight that maps `wide` to `narrow`."""
    batch, channels = wide.shape[:2]
    inside = channels // groups
    x = wide.reshape(batch, groups, inside, *wide.shape[2:]).transpose(0, 2)
    x = x.reshape(inside, groups * batch, *wide.shape[2:])
    filters = narrow.transpose(0, 1)
    kernel, stride, padding, dilation = windows
    found = aten.convolution(x, filters, None, dilation, padding, stride, False, [0] * len(stride), groups)
    # Rows of the input that no window reached give the result more places than the kernel has.
    for axis, size in enumerate(kernel, start=2):
        found = found.narrow(axis, 0, size)
    return found.transpose(0, 1)  # type: ignore[no-any-return]


def _weight_gradient_by_offset(wide: Tensor, narrow: Tensor, windows: _Windows) -> Tensor:
    """As `_weight_gradient` without groups: for each place of the kernel, one matrix product over batch and windows.

    A convolution with the output's gradient as its kernel has as many columns as the kernel has places, which is few:
    in onnxruntime on a CPU this form takes 0.1 to 0.9 of its time. Of large planes the product is one for each sample,
    added up; of small ones samples are joined first, which copies both tensors.
    """
    kernel, stride, padding, dilation = windows
    pads = [p for size in reversed(padding) for p in (size, size)]
    read_from = aten.constant_pad_nd(wide, pads, 0.0) if any(padding) else wide
    is_for_each_sample = _has_large_planes(wide.shape[1], narrow)
    if not is_for_each_sample:
        read_from, narrow = read_from.transpose(0, 1), narrow.transpose(0, 1)
    gradients, found = narrow.flatten(2 if is_for_each_sample else 1), list[Tensor]()
    for place in itertools.product(*map(range, kernel)):
        read = read_from
        for axis, (at, count, s, d) in enumerate(zip(place, narrow.shape[2:], stride, dilation, strict=True), 2):
            read = aten.slice(read, axis, at * d, at * d + (count - 1) * s + 1, s)
        if is_for_each_sample:
            found.append(_product_of_samples(gradients, read.flatten(2)))
        else:
            found.append(gradients @ read.flatten(1).t())
    return torch.stack(found, -1).reshape(*found[0].shape, *kernel)


def _product_of_samples(one: Tensor, other: Tensor) -> Tensor:
    """(channels of one, channels of other), added up over samples; matrices of many rows and few columns are faster."""
    if one.shape[1] < other.shape[1]:
        return _product_of_samples(other, one).t()
    return (one @ other.transpose(1, 2)).sum(0)


def _has_large_planes(channels: int, narrow: Tensor) -> bool:
    """Whether the weights of a kernel's place are few beside what would be copied of a sample otherwise."""
    places = narrow.shape[2:]
    is_known = all(isinstance(size, int) for size in places)
    return is_known and 4 * channels * narrow.shape[1] < math.prod(places) * (channels + narrow.shape[1])


def _is_depthwise(wide: Tensor, channels: int, groups: int) -> bool:
    """Whether each channel of images of known size, which become as many channels, has a kernel."""
    return wide.dim() == 4 and groups == wide.shape[1] == channels and all(isinstance(n, int) for n in wide.shape[2:])


def _is_small(wide: Sequence[int], narrow: Sequence[int], kernel: Sequence[int]) -> bool:
    """Whether the planes of a depthwise convolution are so small that all pairs of their places are few."""
    return math.prod((*wide, *narrow, *kernel)) <= _MOST_PAIRS


def _joined(wide: int, narrow: int, kernel: int, stride: int, padding: int, dilation: int) -> Tensor:
    """(narrow, wide, kernel): 1 where a place of the kernel joins two places of an axis."""
    read = torch.arange(narrow)[:, None, None] * stride + torch.arange(kernel) * dilation - padding
    return torch.arange(wide)[None, :, None] == read


def _joined_planes(wide: Sequence[int], narrow: Sequence[int], windows: _Windows) -> Tensor:
    """(places of narrow * places of wide, places of the kernel): whether one of the kernel joins two of the planes."""
    rows, columns = (_joined(*sizes) for sizes in zip(wide, narrow, *windows, strict=True))
    both = rows[:, None, :, None, :, None] & columns[None, :, None, :, None, :]
    return both.reshape(-1, math.prod(windows.kernel))


def _kernel_matrices(weight: Tensor, wide: Sequence[int], narrow: Sequence[int], windows: _Windows) -> Tensor:
    """(channels, places of narrow, places of wide): the kernel of each channel as a matrix."""
    joined = _joined_planes(wide, narrow, windows).to(weight.device, weight.dtype)
    return (weight.flatten(1) @ joined.t()).reshape(weight.shape[0], math.prod(narrow), math.prod(wide))


def _planes_by_channel(x: Tensor) -> Tensor:
    """(channels, batch, places)."""
    return x.transpose(0, 1).flatten(2)


def _weight_gradient_by_plane(wide: Tensor, narrow: Tensor, windows: _Windows) -> Tensor:
    """As `_weight_gradient` with a group for each channel, of small planes.

    The product of all places of the output's gradient and of the input, of which those pairs count that a place of the
    kernel joins: one matrix product for each channel, where a convolution has one for each channel and sample.
    """
    products = _planes_by_channel(narrow).transpose(1, 2) @ _planes_by_channel(wide)
    joined = _joined_planes(wide.shape[2:], narrow.shape[2:], windows)
    return (products.flatten(1) @ joined.to(wide.device, wide.dtype)).reshape(wide.shape[1], 1, *windows.kernel)


def _input_gradient_by_plane(wide: Tensor, narrow: Tensor, weight: Tensor, windows: _Windows) -> Tensor:
    """The gradient of the input (like `wide`) of a depthwise convolution of small planes from that of its output.

    Each channel's kernel becomes a matrix from places of the output to places of the input.
    """
    matrices = _kernel_matrices(weight, wide.shape[2:], narrow.shape[2:], windows)
    return (_planes_by_channel(narrow) @ matrices).transpose(0, 1).reshape(wide.shape)


def _weight_gradient_by_rows(wide: Tensor, narrow: Tensor, windows: _Windows) -> Tensor:
    """As `_weight_gradient` with a group for each channel.

    For each row of the kernel, the product of all columns of the output's gradient and of the input, over rows and
    samples; of which those pairs count that a column of the kernel joins. This multiplies more than a convolution does,
    and takes an eighth to a half of its time in onnxruntime on a CPU, which calls a matrix product for each channel
    and sample.
    """
    kernel, stride, padding, dilation = windows
    channels, (rows, columns), (count, width) = wide.shape[1], wide.shape[2:], narrow.shape[2:]
    by_channel, gradients = wide.transpose(0, 1), narrow.transpose(0, 1)
    found = []
    for place in range(kernel[0]):
        offset, step = place * dilation[0] - padding[0], stride[0]
        first = max(0, -(offset // step))
        end = max(first, min(count, (rows - 1 - offset) // step + 1))
        if first == end:  # runtimes refuse a product over no rows
            found.append(wide.new_zeros(channels, width * columns))
            continue
        read = aten.slice(by_channel, 2, max(0, first * step + offset), max(0, (end - 1) * step + offset + 1), step)
        given = aten.slice(gradients, 2, first, end).reshape(channels, -1, width)
        found.append((given.transpose(-1, -2) @ read.reshape(channels, -1, columns)).flatten(1))
    counts = _joined(columns, width, kernel[1], stride[1], padding[1], dilation[1]).to(wide.device, wide.dtype)
    return (torch.stack(found, 1) @ counts.reshape(width * columns, kernel[1])).unsqueeze(1)

"""How images are laid out in memory while they are convolved: with the channels of a pixel side by side
(channels-last).

Values and shapes are the same in every layout. What follows a convolution keeps its layout as long as it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onward.lowering.kernels.convolution_gradients import convolution
from onward.lowering.kernels.dtypes import LOW_PRECISION
from onward.lowering.kernels.rematerialize import of, saved_tensor_hook, to_memory_format
from onward.lowering.passes import is_plain

LEAST_BYTES = 2**18
"""Gradients of smaller images may come in any layout: looking takes longer than another layout does."""
MOST_SMALL_PIXELS, MOST_SMALL_CHANNELS = 64, 4
"""Images of no more stay in their layout on a CPU: a network of two such convolutions takes 0.71 of the time of
converted ones. With 8 to 16 channels two convolutions alone gain by staying, but networks lose: batch
normalizations, kernels of one pixel and concatenations are faster with the channels last (1.15 to 1.24 of the time
if the images stay)."""


def convolve_images(
    X: Tensor,
    W: Tensor,
    B: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    group: int,
    channels_last_images: bool,
) -> Tensor:
    """`conv2d` of X (N, C, D1, D2), W (M, C/g, k1, k2) and B (M), in whichever layout is the faster one.

    Without `channels_last_images` X stays in the layout that it comes in. On a GPU torch's compiler chooses a layout by
    itself, but is given X with the channels last in 16 bits: it leaves the first convolution of a network, a segment of
    few nodes, as it comes.

    A kernel of one pixel is a linear layer over the channels of every pixel, a single product of matrices. Where the
    weight is larger than the image it is the image that is converted, and its result converted back.
    """
    if channels_last_images and torch.compiler.is_compiling() and _is_low_on_gpu(X):
        return F.conv2d(X.contiguous(memory_format=torch.channels_last), W, B, stride, padding, dilation, group)
    if not (channels_last_images and _helps(X)):
        with saved_tensor_hook(X):
            return convolution(X, W, B, stride, padding, dilation, group)
    if not is_exact(X.shape[1], stride) and not X.is_cuda:
        X = X.squeeze(1).contiguous().unsqueeze(1)  # with the strides that torch takes for channels first
        return convolution(X, W, B, stride, padding, dilation, group, stays=True)
    has_patches = X.shape[2] >= stride[0] and X.shape[3] >= stride[1]  # torch reports an image that is too small
    if group == 1 and has_patches and not X.is_cuda and is_of_patches(W.shape, stride, padding, dilation):
        return _convolve_patches(X, W, B)
    if not (X.is_cuda or pays(X.shape, W.shape, stride)):
        X = X.contiguous() if torch.compiler.is_compiling() else X
        with saved_tensor_hook(X):
            return convolution(X, W, B, stride, padding, dilation, group, stays=True)
    last = torch.channels_last
    is_of_pixels = tuple(W.shape[2:]) == (1, 1) and group == 1 and not any(padding)
    if not X.is_cuda and not is_of_pixels and W.numel() > X.numel():
        plain = convolution(X.contiguous(), W, B, stride, padding, dilation, group, stays=True)
        return plain.contiguous(memory_format=last)
    if is_of_pixels or not torch.compiler.is_compiling():  # which lays out the rest by itself
        X = channels_last(X)
    with saved_tensor_hook(X):
        if is_of_pixels and not X.is_cuda:
            pixels = X[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1)
            return F.linear(pixels, W.flatten(1), B).permute(0, 3, 1, 2)
        return convolution(X, W, B, stride, padding, dilation, group)


MOST_CHANNELS_OF_PATCHES = 16
"""Patches of 3 channels are faster as a product, those of 32 are not; where it changes was not measured."""


def is_of_patches(
    weight: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> bool:
    """Whether a convolution by a weight [M, C, k1, k2] reads every pixel of a few channels once, as the first layer of
    a vision transformer does.
    """
    is_apart = tuple(weight[2:]) == tuple(stride) and not any(padding) and all(step == 1 for step in dilation)
    return is_apart and tuple(stride) != (1, 1) and weight[1] <= MOST_CHANNELS_OF_PATCHES


def _convolve_patches(X: Tensor, W: Tensor, B: Tensor | None) -> Tensor:
    """One product of all patches and the weight; of 3 channels torch's convolution takes 1.1 to 4 times as long."""
    (height, width), count = W.shape[2:], X.shape[0]
    rows, columns = X.shape[2] // height, X.shape[3] // width

    cells = X[:, :, : rows * height, : columns * width].reshape(count, X.shape[1], rows, height, columns, width)
    patches = cells.permute(0, 2, 4, 1, 3, 5).reshape(count, rows, columns, X.shape[1] * height * width)
    return F.linear(patches, W.flatten(1), B).permute(0, 3, 1, 2)


def pays(image: Sequence[int], weight: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a CPU gains by converting images of this shape for a weight of this shape."""
    pixels = (image[2] // stride[0]) * (image[3] // stride[1])
    return pixels > MOST_SMALL_PIXELS or max(image[1], weight[0]) > MOST_SMALL_CHANNELS


def is_exact(channels: int, stride: Sequence[int]) -> bool:
    """Whether torch's convolution on a CPU is right with the channels last.

    Of one channel, moving by one row and by several columns, torch 2.13 (by oneDNN) leaves parts of a result that is
    one column wide unwritten.
    """
    return not channels == 1 == stride[0] < stride[1]


def channels_last(X: Tensor) -> Tensor:
    """X [N, C, D1, D2] in that layout.

    The strides of one channel fit both layouts, and torch takes them for the other one: then its convolution goes
    through a gradient with the channels last element by element, 8 times as long as through one that it expects.
    """
    if torch.compiler.is_compiling():
        return X.contiguous(memory_format=torch.channels_last)
    if X.shape[1] != 1 or not X.is_contiguous() or of(X) is not None:
        return to_memory_format(X, torch.channels_last)
    return X.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)


LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The layout of as many dimensions, those of images and volumes."""


def has_channels_last(X: Tensor) -> bool:
    """Whether the channels [N, C, D1, ...] of a pixel lie side by side, and not also as they do channels-first."""
    return X.is_contiguous(memory_format=LAST[X.dim()]) and not X.is_contiguous()


def _helps(X: Tensor) -> bool:
    """On CPUs in 32 bits and less, on GPUs in 16."""
    is_compiled = torch.compiler.is_compiling()
    if not is_compiled and get_proxy_mode() is not None:
        return False
    if X.is_cuda:
        return not is_compiled and _is_low_on_gpu(X)
    return X.device.type == "cpu" and X.dtype in (torch.float32, torch.bfloat16)


def _is_low_on_gpu(X: Tensor) -> bool:
    if not X.is_cuda:
        return False
    return X.dtype in LOW_PRECISION or (X.dtype == torch.float32 and torch.is_autocast_enabled("cuda"))


def with_gradient_alike(Y: Tensor) -> Tensor:
    """Y, images whose gradient is converted to their own layout where it comes in another one.

    What an image goes into may turn it into a matrix, whose gradient has the channels first. torch's kernels go through
    a gradient and a tensor of another layout element by element: 4 to 20 times the time, of which a copy takes one.
    """
    is_large = Y.dim() == 4 and Y.requires_grad and Y.numel() * Y.element_size() >= LEAST_BYTES
    if not is_large or torch.compiler.is_compiling() or not (is_plain(Y) and Y.is_cpu):
        return Y
    last = torch.channels_last
    if not Y.is_contiguous() and Y.is_contiguous(memory_format=last):
        Y.register_hook(partial(Tensor.contiguous, memory_format=last))  # type: ignore[no-untyped-call]
    return Y

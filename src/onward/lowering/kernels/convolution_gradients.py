"""Convolutions on CPUs whose gradients are computed as other convolutions, where oneDNN has no kernel of its own.

It fills few channels up to 16 before it computes gradients of images, and has none of depthwise weights beyond 3 x 3.
In compiled code images that keep the channels first are convolved by operators of onward's own, whose layout torch's
compiler leaves as it is: it lays out all that its own convolutions read with the channels last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from onward.lowering.passes import is_plain, is_traced

MOST_CHANNELS = 15
"""Of an image whose gradient is a convolution. With 4 channels and a kernel of 3 x 3 torch's takes 6 times as long; of
depthwise convolutions that are dilated or of three axes 3 to 15 times."""
LEAST_KERNEL, MOST_PIXELS = 4, 1024
"""Along the longer axis of a depthwise kernel whose gradient is a convolution, and of its images. Then torch's takes
1.9 to 4 times as long with the channels last (16 times for kernels of 7 x 7 on as small images), 6 to 18 times with the
channels first. On images of 56 x 56 both take as long. Over three axes it takes 3 to 12 times as long with the channels
first, 0.7 with the channels last."""
MOST_PADDING = 6
"""That oneDNN's kernel for depthwise convolutions takes, with the channels first; from 7 on another one takes 4 to 20
times as long as that does of images with a border of zeros."""

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

P = ParamSpec("P")
Along = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""Stride, padding and dilation of each axis, and the groups."""


def convolution(
    X: Tensor,
    W: Tensor,
    B: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    group: int,
    stays: bool = False,
) -> Tensor:
    """`conv1d`, `conv2d` or `conv3d`; an image that `stays` has the channels first, as its result."""
    along = tuple(stride), tuple(padding), tuple(dilation), group
    if not _is_for_onednn(X, W):
        return _CONVOLVE[X.dim() - 2](X, W, B, *along)
    is_trained = torch.is_grad_enabled()
    turns = is_trained and X.requires_grad and _turns(X, W, along, stays)
    swaps = is_trained and W.requires_grad and _swaps(X, W, group)
    is_called = stays and torch.compiler.is_compiling()
    if not (turns or swaps or is_called):
        return _convolve(X, W, B, along)
    result: Tensor = _Convolution.apply(X, W, B, along, turns, swaps, is_called)  # type: ignore[no-untyped-call]
    return result


def _is_for_onednn(X: Tensor, W: Tensor) -> bool:
    """Whether its kernels compute it in float32, now or in compiled code, and not a graph that is written down."""
    if not (X.is_cpu and X.dtype == W.dtype == torch.float32) or torch.is_autocast_enabled("cpu") or is_traced():
        return False
    return torch.compiler.is_compiling() or is_plain(X)


def _convolve(X: Tensor, W: Tensor, B: Tensor | None, along: Along) -> Tensor:
    """Within a border of zeros where the padding is wide."""
    stride, padding, dilation, group = along
    if max(padding) > MOST_PADDING and _is_depthwise(X, W, group) and X.is_contiguous():
        X, padding = F.pad(X, [size for size in reversed(padding) for _ in range(2)]), (0,) * len(padding)
    return _CONVOLVE[X.dim() - 2](X, W, B, stride, padding, dilation, group)


def _turns(X: Tensor, W: Tensor, along: Along, stays: bool) -> bool:
    """Whether the gradient of an image is the convolution of its result's with the weight turned around."""
    stride, padding, dilation, group = along
    if _is_depthwise(X, W, group):
        gains = X.dim() == 5 or max(dilation) > 1
    else:
        gains = stays and group == max(dilation) == 1 and W.shape[0] <= MOST_CHANNELS
    return gains and set(stride) == {1} and min(_turned_padding(W, padding, dilation)) >= 0


def _turned_padding(W: Tensor, padding: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Of the convolution that is the gradient of an image."""
    return tuple(d * (k - 1) - p for k, p, d in zip(W.shape[2:], padding, dilation, strict=True))


def _swaps(X: Tensor, W: Tensor, group: int) -> bool:
    """Whether the gradient of a weight is the convolution of an image with its result's."""
    if not _is_depthwise(X, W, group):
        return False
    if X.dim() == 5:
        return not torch.compiler.is_compiling() and X.is_contiguous()
    return max(W.shape[2:]) >= LEAST_KERNEL and 1 < math.prod(X.shape[2:]) <= MOST_PIXELS


def _is_depthwise(X: Tensor, W: Tensor, group: int) -> bool:
    return group == X.shape[1] == W.shape[0] and group > 1


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, X: Tensor, W: Tensor, B: Tensor | None, along: Along, turns: bool, swaps: bool, is_called: bool
    ) -> Tensor:
        """Keeps the images and the weight. What `is_called` is an operator of its own in compiled code."""
        ctx.save_for_backward(X, W)
        ctx.along, ctx.turns, ctx.swaps, ctx.is_called = _as_lists(along), turns, swaps, is_called
        return _called(X, W, B, *ctx.along) if is_called else _convolve(X, W, B, along)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of what is no convolution torch's own; can be differentiated."""
        (gradient,), (X, W), along = gradients, ctx.saved_tensors, ctx.along
        of_image, of_weight, of_bias = ctx.needs_input_grad[:3]
        turns, swaps = ctx.turns or ctx.is_called, ctx.swaps or ctx.is_called
        results: list[Tensor | None] = [None, None, None]
        if of_image and turns:
            of_images: Any = _called_image_gradient if ctx.is_called else _image_gradient
            results[0] = of_images(gradient, X, W, *along, ctx.turns)
        if of_weight and swaps:
            of_weights: Any = _called_weight_gradient if torch.compiler.is_compiling() else _weight_gradient
            results[1] = of_weights(gradient, X, W, *along, ctx.swaps)
        if of_bias and swaps:
            results[2] = gradient.sum([axis for axis in range(gradient.dim()) if axis != 1])
        mask = [of_image and not turns, of_weight and not swaps, of_bias and not swaps]
        if any(mask):
            found = _of_torch(mask, gradient, X, W, along)
            results = [own if own is not None else one for own, one in zip(results, found, strict=True)]
        return *results, None, None, None, None


def _as_lists(along: Along) -> tuple[list[int], list[int], list[int], int]:
    """As operators of torch want them."""
    stride, padding, dilation, group = along
    return list(stride), list(padding), list(dilation), group


def _of_torch(mask: list[bool], gradient: Tensor, X: Tensor, W: Tensor, along: Sequence[Any]) -> Sequence[Any]:
    """Gradients of image, weight and bias, as far as the mask asks for them."""
    *windows, group = along
    others = [W.shape[0]], *windows, False, [0] * len(windows[0]), group
    found: Sequence[Any] = torch.ops.aten.convolution_backward(gradient, X, W, *others, mask)
    return found


def _image_gradient(
    gradient: Tensor,
    X: Tensor,
    W: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    group: int,
    turns: bool,
) -> Tensor:
    """As a convolution of the result's gradient with the weight turned around, or torch's own."""
    if not turns:
        found: Tensor = _of_torch([True, False, False], gradient, X, W, (stride, padding, dilation, group))[0]
        return found
    turned = W.flip(list(range(2, W.dim())))
    turned = turned.transpose(0, 1) if group == 1 else turned
    rest = _turned_padding(W, padding, dilation)
    return _convolve(gradient, turned, None, (tuple(stride), rest, tuple(dilation), group))


def _weight_gradient(
    gradient: Tensor,
    X: Tensor,
    W: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    group: int,
    swaps: bool,
) -> Tensor:
    """torch's own; of a depthwise weight [C, 1, k1, ..] that `swaps`, each image's channel convolved with its gradient.

    As kernels the gradients step by the dilation and reach by the stride; what lies beyond an image's last step is cut.
    """
    if not swaps:
        found: Tensor = _of_torch([False, True, False], gradient, X, W, (stride, padding, dilation, group))[1]
        return found
    count, channels = X.shape[:2]
    if not count:
        return torch.zeros_like(W)
    images = X.contiguous().view(1, count * channels, *X.shape[2:])
    kernels = gradient.contiguous().view(count * channels, 1, *gradient.shape[2:])
    along = tuple(dilation), tuple(padding), tuple(stride), count * channels
    places = _convolve(images, kernels, None, along)
    for axis, size in enumerate(W.shape[2:], 2):
        places = places.narrow(axis, 0, size)
    return places.reshape(count, *W.shape).sum(0)


# ---------------------------------------------------------------------- in compiled code


def _with_channels_first(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """What compiled code is told of a result's layout holds."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        return function(*args, **kwargs).contiguous()

    return call


@_with_channels_first
def _convolve_first(
    X: Tensor,
    W: Tensor,
    B: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    group: int,
) -> Tensor:
    return _convolve(X, W, B, (tuple(stride), tuple(padding), tuple(dilation), group))


_called = torch.library.custom_op("onward::convolution", _convolve_first, mutates_args=())
_called_image_gradient = torch.library.custom_op(
    "onward::convolution_image_gradient", _with_channels_first(_image_gradient), mutates_args=()
)
_called_weight_gradient = torch.library.custom_op(
    "onward::convolution_weight_gradient", _with_channels_first(_weight_gradient), mutates_args=()
)
_called.register_fake(_convolve_first)


@_called_image_gradient.register_fake
def _(gradient: Tensor, X: Tensor, *_: Any) -> Tensor:
    return gradient.new_empty(X.shape)


@_called_weight_gradient.register_fake
def _(gradient: Tensor, X: Tensor, W: Tensor, *_: Any) -> Tensor:
    return gradient.new_empty(W.shape)


@register_flop_formula([torch.ops.onward.convolution])
def _(image: list[int], weight: list[int], *_: Any, out_shape: list[int]) -> int:
    """For the choice of what is kept for the backward pass, as torch counts those of its own convolutions."""
    return conv_flop_count(image, weight, out_shape)


@register_flop_formula([torch.ops.onward.convolution_image_gradient, torch.ops.onward.convolution_weight_gradient])
def _(gradient: list[int], image: list[int], weight: list[int], *_: Any, **__: Any) -> int:
    return conv_flop_count(image, weight, gradient)

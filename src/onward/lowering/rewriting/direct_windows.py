"""Direct calls of convolutions and pooling: windows are laid once, when shapes become known, and not at every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from onward.lowering.building.tensor_facts import TensorFact, fact_about
from onward.lowering.kernels import rematerialize
from onward.lowering.kernels.layout import channels_last, convolve_images, is_exact, is_of_patches, pays
from onward.lowering.kernels.max_pooling import keeps_bytes, pool_max
from onward.lowering.kernels.windows import Windows, lay_windows

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: torch.conv1d, 3: torch.conv3d}


def convolution(node: fx.Node) -> Call | None:
    """Of float32 and one, two or three spatial axes that are padded alike on both sides."""
    X, W, given = fact_about(node.args[0]), fact_about(node.args[1]), node.kwargs
    bias = node.args[2] if len(node.args) > 2 else None
    group: Any = given.get("group", 1)
    if X is None or W is None or len(X.shape) != len(W.shape) or len(X.shape) not in (3, 4, 5):
        return None
    if X.dtype is not torch.float32 or W.dtype is not X.dtype or X.shape[1] != W.shape[1] * group:
        return None
    if bias is not None and fact_about(bias) != TensorFact((W.shape[0],), W.dtype):
        return None
    windows = _windows(X, W.shape[2:], given)
    if windows is None or (given.get("kernel_shape") or W.shape[2:]) != W.shape[2:]:
        return None
    along = (windows.stride, windows.begin, windows.dilation, group)
    arguments = (*node.args[:2], bias, *along)
    if len(X.shape) != 4:
        return _CONVOLVE[len(X.shape) - 2], arguments, {}
    is_cut = group == 1 and is_of_patches(W.shape, windows.stride, windows.begin, windows.dilation)
    is_usual = windows.kernel != (1, 1) and not is_cut and torch.Size(W.shape).numel() <= torch.Size(X.shape).numel()
    is_last = bool(given.get("channels_last_images", True))
    is_converted = is_last and is_exact(X.shape[1], windows.stride) and pays(X.shape, W.shape, windows.stride)
    if is_usual and is_converted and X.nbytes < rematerialize.LEAST_BYTES:
        return _convolve_small, arguments, {}
    return convolve_images, (*arguments, is_last), {}


def _convolve_small(X: Tensor, W: Tensor, B: Tensor | None, *along: Any) -> Tensor:
    """`convolve_images` of images that are kept."""
    return torch.conv2d(channels_last(X) if X.is_cpu else X, W, B, *along)


def max_pooling(node: fx.Node) -> Call | None:
    """Of images, their maxima alone; `max_pool` gives a tuple of them."""
    X, given = fact_about(node.args[0]), node.kwargs
    if X is None or len(X.shape) != 4 or not X.dtype.is_floating_point or given["output_count"] != 1:
        return None
    windows = _windows(X, given["kernel_shape"], given)
    if windows is None:
        return None
    axes = zip(windows.begin, windows.kernel, windows.dilation, X.shape[2:], strict=True)
    if not all(2 * p <= k and (not p or d <= size) for p, k, d, size in axes):
        return None
    along = (windows.kernel, windows.stride, windows.begin, windows.dilation)
    is_small = X.nbytes < rematerialize.LEAST_BYTES and not keeps_bytes(torch.Size(X.shape).numel(), windows.stride)
    return _maxima_of_small if is_small else _maxima, (node.args[0], along, bool(given.get("ceil_mode"))), {}


def _maxima(*arguments: Any) -> tuple[Tensor]:
    return (pool_max(*arguments),)


def _maxima_of_small(X: Tensor, along: Sequence[tuple[int, ...]], ceiling: bool) -> tuple[Tensor]:
    """`pool_max` of images that are kept, with places as torch keeps them."""
    kernel, stride, padding, dilation = along
    return (torch.max_pool2d(X, kernel, stride, padding, dilation, ceiling),)


def _windows(X: TensorFact, kernel: Any, given: Any) -> Windows | None:
    """The windows over the spatial axes of X; None where padding differs between the two sides, or cuts off."""
    strides, dilations, pads = (given.get(name) for name in ("strides", "dilations", "pads"))
    auto_pad, is_ceiled = given.get("auto_pad", "NOTSET"), bool(given.get("ceil_mode"))
    try:
        windows = lay_windows(X.shape[2:], tuple(kernel), strides, dilations, pads, auto_pad, is_ceiled)
    except ValueError:  # the call itself says what is wrong, and in which node
        return None
    return windows if windows.symmetric and min(windows.begin, default=0) >= 0 else None

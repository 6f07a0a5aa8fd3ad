"""Batch normalization in training, and its gradients, with few passes over the tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

aten = torch.ops.aten

_LARGE_PLANE = 512
"""Places from which a product for each sample and channel is worth its call."""


def normalization_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """ATen operator -> its decomposition."""
    backward = aten.native_batch_norm_backward.default
    legit, functional = aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional.default
    forward = [aten.native_batch_norm.default, legit.default, legit.no_stats, functional]
    own: dict[Any, Callable[..., Any]] = {
        operator: functools.partial(_batch_norm, decomposition, operator is functional)
        for operator, decomposition in get_decompositions(forward).items()
    }
    own[aten.native_layer_norm.default] = _layer_norm
    own[backward] = functools.partial(_batch_norm_backward, get_decompositions([backward])[backward])
    return own


def _batch_norm(
    decomposition: Callable[..., Any],
    is_functional: bool,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *more: Any,
) -> Any:
    """As torch's, which centers the input twice, multiplies twice and adds.

    Here a scale and a shift of a channel do it, of the centered input, which the variance and the gradient read, too:
    the input itself is needed no longer.
    """
    *statistics, is_training, momentum, epsilon = more
    if not is_training:
        return decomposition(input, weight, bias, *more)
    axes = [axis for axis in range(input.dim()) if axis != 1]
    wide = input.float() if input.dtype is torch.float16 else input
    mean = wide.mean(axes)
    centered = _centered(wide, mean)
    elements: Any = input.numel() / input.shape[1]
    variance = _sum_of_products(centered, centered) / elements
    inverse = (variance + epsilon).rsqrt()
    scale = inverse if weight is None else inverse * weight
    output = _scale_and_shift(centered, scale, torch.zeros_like(scale) if bias is None else bias)
    # Of one value per channel torch's is 0 / 0, by which every update would be skipped; the population's variance is 0.
    unbiased = variance * (elements / torch.sym_max(elements - 1, 1))  # type: ignore[no-untyped-call]
    news = []
    for old, now in zip(statistics, (mean, unbiased), strict=False):
        new = None if old is None else momentum * now + (1 - momentum) * old
        if new is not None and not is_functional:
            old.copy_(new)
        news.append(new)
    return output.to(input.dtype), mean, inverse, *(news if is_functional else ())


def _centered(input: Tensor, mean: Tensor) -> Tensor:
    return input - mean.reshape([1, -1, *[1] * (input.dim() - 2)])


def _sum_of_products(one: Tensor, other: Tensor) -> Tensor:
    """Of each channel: of large planes as products of a row and a column, which write nothing between."""
    axes = [axis for axis in range(one.dim()) if axis != 1]
    places = one.shape[2:]
    if not all(isinstance(size, int) for size in places) or math.prod(places) < _LARGE_PLANE:
        return (one * other).sum(axes)
    rows = [value.reshape(-1, 1, math.prod(places)) for value in (one, other)]
    # Transposed, since onnxruntime multiplies by the rows of a transposed matrix nine times as fast as by its columns.
    return (rows[0] @ rows[1].transpose(1, 2)).reshape(-1, one.shape[1]).sum(0)


def _layer_norm(input: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Any:
    """Of float16 in float32, with the statistics in float32, which `LayerNormalization` gives in that type only."""
    if input.dtype is not torch.float16:
        return NotImplemented
    wide = [None if one is None else one.float() for one in (weight, bias)]
    output, mean, inverse = aten.native_layer_norm(input.float(), shape, *wide, epsilon)
    return output.to(input.dtype), mean, inverse


def _scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Of each channel; a normalization by a mean of 0 and a variance of 1, which is one operator."""
    zeros, ones = torch.zeros_like(scale), torch.ones_like(scale)
    found: Tensor = aten._native_batch_norm_legit_no_training(x, scale, shift, zeros, ones, 0.0, 0.0)[0]
    return found


def _batch_norm_backward(
    decomposition: Callable[..., Any],
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> Any:
    """Ioffe & Szegedy 2015, section 3, solved for one factor of the gradient and one of the centered input."""
    if not train or input.dtype is not torch.float32:
        statistics = (running_mean, running_var, save_mean, save_invstd)
        return decomposition(grad_out, input, weight, *statistics, train, eps, output_mask)
    assert save_mean is not None
    assert save_invstd is not None
    axes = [axis for axis in range(input.dim()) if axis != 1]
    shape = [-1, *[1] * (input.dim() - 2)]
    elements: Any = input.numel() / input.shape[1]
    centered = _centered(input, save_mean)
    grad_bias, product = grad_out.sum(axes), _sum_of_products(grad_out, centered)
    scale = save_invstd if weight is None else save_invstd * weight
    factor = -scale * save_invstd * save_invstd * product / elements
    moved = _scale_and_shift(grad_out, scale, -scale * grad_bias / elements)
    return moved + centered * factor.reshape(shape), product * save_invstd, grad_bias

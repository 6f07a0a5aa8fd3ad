"""Normalization of channels-last images whose mean is large compared with their deviation.

There torch's CPU kernels accumulate in float32, for groups in a single pass, and lose digits that their contiguous
counterparts keep. A normalization is invariant to a shift of its input: the mean is subtracted first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from onward.lowering.kernels.dtypes import LOW_PRECISION
from onward.lowering.kernels.wide_gradients import widened_to_compile

LARGEST_RATIO = 2.0
"""Of a mean to its deviation: up to here the kernels lose less than they round."""


def may_lose_digits(X: Tensor) -> bool:
    """Whether torch normalizes X [N, C, ...] by its own channels-last kernel."""
    if torch.compiler.is_compiling() or type(X) is not Tensor or is_functorch_wrapped_tensor(X):
        return False
    is_dense = X.dim() in (4, 5) and X.numel() > 0 and X.device.type == "cpu" and X.dtype.itemsize >= 4
    return is_dense and X.stride(1) == 1 and not X.is_contiguous()


def are_large(mean: Tensor, inverse_deviation: Tensor) -> bool:
    """Whether means are so large against deviations that digits are lost; what is not a number is as well."""
    return not bool((mean.detach() * inverse_deviation.detach()).abs().max() <= LARGEST_RATIO)


def without_mean(X: Tensor, mean: Tensor, inverse_deviation: Tensor) -> Tensor | None:
    """X [N, C, ...] less a large mean [C], for a kernel that would lose digits; None: it loses none."""
    if not may_lose_digits(X) or not are_large(mean, inverse_deviation):
        return None
    return X - mean.detach().reshape(-1, *[1] * (X.dim() - 2))


def group_norm(X: Tensor, groups: int, scale: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """`torch.group_norm` of X [N, C, ...], with scale and bias [C]."""
    # F.group_norm would refuse a single value per group, which the standard allows.
    if X.is_cpu and X.dtype in LOW_PRECISION:  # else torch rounds the statistics to 16 bits
        scale, bias = (None if p is None else p.to(torch.float32) for p in (scale, bias))
    if not may_lose_digits(X):
        wide = widened_to_compile(X)
        return torch.group_norm(wide, groups, scale, bias, epsilon).to(X.dtype)
    X = X.contiguous(memory_format=torch.channels_last if X.dim() == 4 else torch.channels_last_3d)
    sizes = X.shape[0], X.shape[1], X.shape[2:].numel(), groups
    Y, mean, inverse = torch.native_group_norm(X, scale, bias, *sizes, epsilon)
    if are_large(mean, inverse):
        shift = mean.detach().repeat_interleave(X.shape[1] // groups, 1)
        shift = shift.reshape(*X.shape[:2], *[1] * (X.dim() - 2))
        Y = torch.native_group_norm(X - shift, scale, bias, *sizes, epsilon)[0]
    return Y

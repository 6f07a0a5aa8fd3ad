"""Normalization over the batch, layers, groups, channels and vectors.

Legend: N batch, C channels, D1...Dn spatial axes. Low-precision inputs are normalized in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.dtypes import LOW_PRECISION, torch_dtype, wide_type
from onward.lowering.kernels.large_means import group_norm, may_lose_digits, without_mean
from onward.lowering.kernels.layer_norms import layer_norm
from onward.lowering.kernels.layout import with_gradient_alike
from onward.lowering.kernels.rematerialize import is_worth_rematerializing, normalized
from onward.lowering.kernels.single_images import canonicalize_strides, with_canonical_gradient
from onward.lowering.kernels.wide_gradients import widened_to_compile
from onward.lowering.ops.fused import rms_norm
from onward.lowering.passes import is_recomputing, is_traced
from onward.lowering.process_groups import sum_over_group
from onward.lowering.registry import lowers, takes_attributes_of


@lowers("BatchNormalization", since=14)
def batch_normalization(
    X: Tensor,
    scale: Tensor,
    B: Tensor,
    input_mean: Tensor,
    input_var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
    training: bool,
    owned: tuple[bool, ...],
    output_count: int,
    replica_group: str,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__BatchNormalization.html; X (N, C, D1..Dn), the others (C).

    If mean and variance are tensors of the model, the network's mode decides: in training mode the batch's own
    statistics normalize, and the running statistics are updated in place, `running * momentum + batch * (1 -
    momentum)` with the population variance. If they are inputs of the graph, the node's `training_mode` decides and
    nothing is updated in place. Outputs 1 and 2 are the updated running statistics.
    """
    if not (training if owned[3] and owned[4] else training_mode):
        return _normalize_by_running(X, scale, B, input_mean, input_var, epsilon), input_mean, input_var
    track = owned[3] and owned[4]
    Y, mean, variance = _normalize_by_batch(X, scale, B, epsilon, replica_group, output_count > 1 and not track)
    if output_count == 1:
        if track and not is_recomputing():
            _update((input_mean, input_var), (mean, variance), momentum)
        return (Y,)
    running_mean = _blend(input_mean, mean, momentum)
    running_variance = _blend(input_var, variance, momentum)
    if track and not is_recomputing():
        with torch.no_grad():
            input_mean.copy_(running_mean)
            input_var.copy_(running_variance)
    return Y, running_mean, running_variance


@torch.no_grad()
def _update(running: Sequence[Tensor], batch: Sequence[Tensor], momentum: float) -> None:
    """Blends statistics into the running ones in place, all in one call where types agree, with the same bits.

    A graph that is written down has no operator on lists of tensors.
    """
    if is_traced() or any(old.dtype != new.dtype for old, new in zip(running, batch, strict=True)):
        for old, new in zip(running, batch, strict=True):
            old.copy_(_blend(old, new, momentum))
        return
    olds, news = list(running), torch._foreach_mul([new.detach() for new in batch], 1 - momentum)
    torch._foreach_mul_(olds, momentum)
    torch._foreach_add_(olds, news)


def _blend(running: Tensor, batch: Tensor, momentum: float) -> Tensor:
    return (running.to(batch.dtype) * momentum + batch * (1 - momentum)).to(running.dtype)


def _normalize_by_running(X: Tensor, scale: Tensor, B: Tensor, mean: Tensor, var: Tensor, epsilon: float) -> Tensor:
    x = X if X.dim() > 1 else X[:, None]
    wide = wide_type(x.dtype)
    mean, var, scale, B = (t.to(wide) for t in (mean, var, scale, B))
    # torch's kernel has no gradient for statistics; inputs of the graph may want one.
    if mean.requires_grad or var.requires_grad:
        return _apply(x.to(wide), scale, B, mean, var, epsilon).to(X.dtype).reshape(X.shape)
    return _shaped(
        with_canonical_gradient(F.batch_norm(canonicalize_strides(x), mean, var, scale, B, False, 0.0, epsilon)),
        X.shape,
    )


def _shaped(Y: Tensor, shape: Sequence[int]) -> Tensor:
    """Y in a shape; as it is where it has it, since a view of one image no longer has its memory layout."""
    return Y if Y.shape == torch.Size(shape) else Y.reshape(shape)


def _apply(x: Tensor, scale: Tensor, B: Tensor, mean: Tensor, variance: Tensor, epsilon: float) -> Tensor:
    """The formula, written out; the parameters are along axis 1."""
    channels = [1, -1, *[1] * (x.dim() - 2)]
    factor = scale * (variance + epsilon).rsqrt()
    return (x - mean.reshape(channels)) * factor.reshape(channels) + B.reshape(channels)


def _normalize_by_batch(
    X: Tensor, scale: Tensor, B: Tensor, epsilon: float, replica_group: str, differentiable: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized X, and the batch's mean and population variance (C).

    torch's kernel hands out the unbiased variance through running statistics of momentum 1, but no gradient through
    them, and refuses a single value per channel; then the same is written out.
    """
    x = X if X.dim() > 1 else X[:, None]
    wide = wide_type(x.dtype)
    scale, B = scale.to(wide), B.to(wide)
    count = x.numel() // x.shape[1]
    if replica_group:
        mean, variance = _statistics_of_replicas(x.to(wide), replica_group)
        return _apply(x.to(wide), scale, B, mean, variance, epsilon).to(X.dtype).reshape(X.shape), mean, variance
    if count > 1 and not differentiable:
        x = canonicalize_strides(widened_to_compile(x))
        Y, mean, variance = _normalize_by_kernel(x, scale, B, epsilon, X.dim() > 1 and is_worth_rematerializing(X))
        Y = with_gradient_alike(_shaped(with_canonical_gradient(Y.to(X.dtype)), X.shape))
        return Y, mean, variance * ((count - 1) / count)
    x = x.to(wide)
    variance, mean = torch.var_mean(x, dim=[axis for axis in range(x.dim()) if axis != 1], correction=0)
    Y = _apply(x, scale, B, mean, variance, epsilon)
    return Y.to(X.dtype).reshape(X.shape), mean, variance


def _normalize_by_kernel(
    x: Tensor, scale: Tensor, B: Tensor, epsilon: float, remake: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized x, and the batch's mean and unbiased variance (C), by torch's kernel."""
    mean, variance = torch.zeros_like(scale), torch.ones_like(scale)
    if not remake and not may_lose_digits(x):
        return F.batch_norm(x, mean, variance, scale, B, training=True, momentum=1.0, eps=epsilon), mean, variance
    Y, *statistics = torch.native_batch_norm(x, scale, B, mean, variance, True, 1.0, epsilon)
    shifted = without_mean(x, *statistics)
    if shifted is not None:
        x, shift = shifted, mean.clone()
        Y, *statistics = torch.native_batch_norm(x, scale, B, mean, variance, True, 1.0, epsilon)
        mean = mean + shift
    return normalized(x, Y, scale, B, *statistics) if remake else Y, mean, variance


def _statistics_of_replicas(x: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Mean and population variance (C) over all replicas' batches; two sums, since squares alone would lose digits."""
    axes = [axis for axis in range(x.dim()) if axis != 1]
    count = x.new_full((1,), x.numel() // x.shape[1])
    sums = sum_over_group(torch.cat([x.sum(axes), count]), group)
    total, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
    centered = x - mean.reshape([1, -1, *[1] * (x.dim() - 2)])
    return mean, sum_over_group(centered.square().sum(axes), group) / total


def _flatten_features(X: Tensor, spatial: int, *parameters: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`spatial=0` has statistics for every element of (C, D1..Dn): X becomes (N, C*D1*..*Dn)."""
    if spatial:
        return X, parameters
    return X.flatten(1), tuple(p.flatten() for p in parameters)


@lowers("BatchNormalization", since=7)
def batch_normalization_7(
    X: Tensor,
    scale: Tensor,
    B: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
    training: bool,
    owned: tuple[bool, ...],
    output_count: int,
    replica_group: str,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/text_diff_BatchNormalization_9_14.html: more than one output means training mode.

    As in later versions the network's mode decides where the statistics belong to the model. Outputs 3 and 4 are
    the statistics that normalized X. `spatial=0` (version 7, 8) normalizes every element over the batch.
    """
    shape, given = X.shape, (mean, var)
    X, (scale, B, mean, var) = _flatten_features(X, spatial, scale, B, mean, var)
    track = owned[3] and owned[4]
    if not (training if track else output_count > 1):
        return _shaped(_normalize_by_running(X, scale, B, mean, var, epsilon), shape), *given, *given
    Y, batch_mean, batch_variance = _normalize_by_batch(
        X, scale, B, epsilon, replica_group, output_count > 1 and not track
    )
    statistics = tuple(t.reshape(given[0].shape) for t in (batch_mean, batch_variance))
    updated = tuple(_blend(old, new, momentum) for old, new in zip(given, statistics, strict=True))
    if track and not is_recomputing():
        with torch.no_grad():
            for old, new in zip(given, updated, strict=True):
                old.copy_(new)
    return _shaped(Y, shape), *updated, *statistics


@lowers("BatchNormalization", since=1)
@takes_attributes_of(batch_normalization_7)
def batch_normalization_1(
    X: Tensor,
    scale: Tensor,
    B: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    is_test: int = 0,
    output_count: int,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/text_diff_BatchNormalization_6_7.html: `is_test` forbids the training mode.

    It binds only where the statistics are inputs of the graph; elsewhere the network's mode decides.
    """
    return batch_normalization_7(X, scale, B, mean, var, output_count=1 if is_test else output_count, **attributes)


@lowers("LayerNormalization", since=17)
def layer_normalization(
    X: Tensor,
    Scale: Tensor,
    B: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__LayerNormalization.html; outputs Y, Mean and InvStdDev.

    X is normalized over the axes from `axis` on; Scale and B broadcast to X.
    """
    axes = _axes_from(axis, X.dim())
    shape = X.shape[axes[0] :]
    if Scale.shape == shape and (B is None or B.shape == shape):
        Y = _layer_norm(X, shape, Scale, B, epsilon)
    else:
        Y = _layer_norm(X, shape, None, None, epsilon) * Scale
        Y = Y if B is None else Y + B
    if output_count == 1:
        return (Y,)
    stash = X.to(torch_dtype(stash_type, "stash_type"))
    variance, mean = torch.var_mean(stash, dim=axes, correction=0, keepdim=True)
    return Y, mean, (variance + epsilon).rsqrt()


def _axes_from(axis: int, rank: int) -> list[int]:
    if not -rank <= axis < rank:
        raise ValueError(f"axis is {axis}; an input of rank {rank} takes {-rank} to {rank - 1}.")
    return list(range(axis % rank, rank))


def _layer_norm(X: Tensor, shape: Sequence[int], scale: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """torch's kernel, which computes low precision in float32; with parameters of another type, all in the wider."""
    dtype = X.dtype
    for parameter in (scale, bias):
        if parameter is not None:
            dtype = torch.promote_types(dtype, parameter.dtype)
    weight, offset = (None if p is None else p.to(dtype) for p in (scale, bias))
    return layer_norm(X.to(dtype), shape, weight, offset, epsilon).to(X.dtype)


@lowers("RMSNormalization", since=23)
def rms_normalization(
    X: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__RMSNormalization.html; over the axes from `axis` on, scale broadcasts."""
    axes = _axes_from(axis, X.dim())
    shape = X.shape[axes[0] :]
    dtype = scale.dtype
    if scale.shape == shape and dtype == X.dtype and (X.dtype not in LOW_PRECISION or stash_type == 1):
        return rms_norm(X, shape, scale, epsilon)
    stash = X.to(torch_dtype(stash_type, "stash_type"))
    normalized = stash * (stash.square().mean(dim=axes, keepdim=True) + epsilon).rsqrt()
    return normalized.to(dtype) * scale


@lowers("GroupNormalization", since=21)
def group_normalization(
    X: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5, num_groups: int, stash_type: int = 1
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__GroupNormalization.html; X (N, C, D1..Dn), scale and bias (C)."""
    channels = X.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"num_groups is {num_groups}, which does not divide the {channels} channels of X.")
    if scale.shape != (channels,) or bias.shape != (channels,):
        raise ValueError(
            f"scale has shape {list(scale.shape)} and bias {list(bias.shape)}; expected [{channels}], one per channel."
        )
    return group_norm(X, num_groups, scale.to(X.dtype), bias.to(X.dtype), epsilon)


@lowers("GroupNormalization", since=18)
def group_normalization_18(X: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5, num_groups: int) -> Tensor:
    """https://onnx.ai/onnx/operators/text_diff_GroupNormalization_18_21.html; scale and bias are (num_groups)."""
    if scale.shape != (num_groups,) or bias.shape != (num_groups,):
        raise ValueError(
            f"scale has shape {list(scale.shape)} and bias {list(bias.shape)}; before opset 21 both are "
            f"[{num_groups}], one per group."
        )
    repeats = X.shape[1] // num_groups
    scale, bias = scale.repeat_interleave(repeats), bias.repeat_interleave(repeats)
    return group_normalization(X, scale, bias, epsilon=epsilon, num_groups=num_groups)


@lowers("InstanceNormalization", since=1)
def instance_normalization(input: Tensor, scale: Tensor, B: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__InstanceNormalization.html: one group per channel."""
    return group_normalization(input, scale, B, epsilon=epsilon, num_groups=input.shape[1])


@lowers("LRN", since=1)
def lrn(X: Tensor, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__LRN.html; over `size` neighboring channels, the longer side upwards."""
    if size < 1:
        raise ValueError(f"size is {size}; at least one channel is normalized over.")
    squares = X.square().flatten(2).unsqueeze(1) if X.dim() > 2 else X.square()[:, None, :, None]
    below = (size - 1) // 2
    padded = F.pad(squares, (0, 0, below, size - 1 - below))
    means = F.avg_pool2d(padded, (size, 1), stride=1).squeeze(1).reshape(X.shape)
    return X / (bias + alpha * means) ** beta


@lowers("LpNormalization", since=1)
def lp_normalization(input: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__LpNormalization.html; a vector of zeros stays one."""
    if p not in (1, 2):
        raise ValueError(f"p is {p}; only 1 and 2 are defined.")
    norm = torch.linalg.vector_norm(input, p, dim=axis, keepdim=True)
    return input / torch.where(norm == 0, 1, norm)


@lowers("MeanVarianceNormalization", since=9)
def mean_variance_normalization(X: Tensor, *, axes: tuple[int, ...] = (0, 2, 3)) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__MeanVarianceNormalization.html; 1e-9 is added to the deviation."""
    wide = X.to(wide_type(X.dtype))
    variance, mean = torch.var_mean(wide, dim=axes, correction=0, keepdim=True)
    # A constant region has deviation zero, whose root has no gradient; its result is zero.
    spread = torch.where(variance > 0, variance, 1).sqrt() * (variance > 0)
    return ((wide - mean) / (spread + 1e-9)).to(X.dtype)

"""How quantization-aware training finds scales (`onward.graph.quantize_aware`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onward.graph.fusion.rewriting import DOMAIN
from onward.lowering.passes import is_recomputing
from onward.lowering.process_groups import largest_of_group
from onward.lowering.registry import lowers

AVERAGING_CONSTANT = 0.01
"""What a new observation counts in a moving average, in torch.ao."""
SMALLEST = torch.finfo(torch.float32).eps
"""The smallest scale, in torch.ao."""


@lowers("ScaleGradient", domain=DOMAIN)
def scale_gradient(scale: Tensor, *, factor: float, largest: float = math.inf) -> Tensor:
    """The absolute value of a scale, and no more than the largest; its gradient, times a factor (LSQ, section 2.2)."""
    positive = scale.abs()
    return positive.detach().clamp(max=largest) + (positive - positive.detach()) * factor


@lowers("MovingScale", domain=DOMAIN)
def moving_scale(
    x: Tensor,
    running: Tensor,
    *,
    span: float,
    axis: int | None = None,
    largest: float = math.inf,
    training: bool,
    replica_group: str,
) -> Tensor:
    """The running scale of a tensor, or of each index of an axis, which training updates in place before it is used.

    The first observation is taken as it is. With `replica_group`, the largest value is that of all replicas. The scale
    is used up to `largest`.
    """
    return _moving_scale(x, running, span, axis, largest, training, (replica_group,))


@lowers("MovingScaleOfShards", domain="onward.parallel")
def moving_scale_of_shards(
    x: Tensor,
    running: Tensor,
    *,
    span: float,
    axis: int | None = None,
    largest: float = math.inf,
    cut_axis: int,
    blocks: tuple[int, ...],
    rank: int,
    size: int,
    training: bool,
    replica_group: str,
    horizontal_group: str,
) -> Tensor:
    """The same of a tensor of which every rank has a shard."""
    return _moving_scale(x, running, span, axis, largest, training, (horizontal_group, replica_group))


def _moving_scale(
    x: Tensor,
    running: Tensor,
    span: float,
    axis: int | None,
    largest: float,
    training: bool,
    groups: tuple[str, ...],
) -> Tensor:
    if training and not is_recomputing():
        with torch.no_grad():
            seen = x.detach().abs()
            peak = seen.amax() if axis is None else seen.amax([one for one in range(x.dim()) if one != axis])
            for group in groups:
                peak = largest_of_group(peak, group) if group else peak
            scale = (peak.to(running.dtype) / span).clamp(min=SMALLEST)
            running.copy_(torch.where(running == 0, scale, running + AVERAGING_CONSTANT * (scale - running)))
    current = running.clone()
    return torch.where(current == 0, 1.0, current).clamp(max=largest)

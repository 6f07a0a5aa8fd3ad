"""Norms over an axis of which every rank has a part: the ranks add up a row's statistics, forward and backward."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from onward.lowering.registry import lowers
from onward.parallel.horizontal.collectives import EnterRegion, LeaveRegion
from onward.plan.horizontal.cuts import DOMAIN


@lowers("LayerNormOverRanks", domain=DOMAIN)
def layer_norm_over_ranks(
    X: Tensor,
    Scale: Tensor | None = None,
    B: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    cut_axis: int,
    blocks: tuple[int, ...],
    rank: int,
    size: int,
    horizontal_group: str,
) -> Tensor:
    """LayerNormalization over the last axis; Scale and B are the rank's parts."""
    x = _wide(X)
    own, width = x.shape[-1], sum(blocks)
    mean = x.mean(-1, keepdim=True)
    squares = (x - mean).square().sum(-1, keepdim=True)
    # In 64 bits, in which sums of a few numbers a row lose nothing when the mean is taken off.
    mean, squares = mean.double(), squares.double()
    sums = _over_ranks(torch.cat([own * mean, squares + own * mean.square()], -1), horizontal_group) / width
    mean, square = sums[..., :1], sums[..., 1:]
    variance = (square - mean.square()).clamp_min(0.0)
    return _scaled((x - mean.to(x.dtype)) * (variance + epsilon).rsqrt().to(x.dtype), X, Scale, B)


@lowers("RMSNormOverRanks", domain=DOMAIN)
def rms_norm_over_ranks(
    X: Tensor,
    scale: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    cut_axis: int,
    blocks: tuple[int, ...],
    rank: int,
    size: int,
    horizontal_group: str,
) -> Tensor:
    """RMSNormalization over the last axis; scale is the rank's part."""
    x = _wide(X)
    square = _over_ranks(x.square().sum(-1, keepdim=True), horizontal_group) / sum(blocks)
    return _scaled(x * (square + epsilon).rsqrt(), X, scale, None)


def _wide(X: Tensor) -> Tensor:
    return X.to(torch.promote_types(X.dtype, torch.float32))


def _over_ranks(x: Tensor, group: str) -> Tensor:
    """The sum over the ranks, each of which continues with its part: gradients are added up, too."""
    return EnterRegion.apply(LeaveRegion.apply(x, group), group)  # type: ignore[no-any-return,no-untyped-call]


def _scaled(x: Tensor, X: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    given = [X, *(one for one in (scale, bias) if one is not None)]
    x = x if scale is None else x * scale
    x = x if bias is None else x + bias
    return x.to(functools.reduce(torch.promote_types, (one.dtype for one in given)))

"""Fused attention of a rank's own heads, with dropout inside that differs from rank to rank."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from onward.lowering.ops.fused_attention import _with_known_mask
from onward.lowering.ops.fused_attention import attention as attend
from onward.lowering.registry import lowers
from onward.lowering.simplification import simplifies
from onward.parallel.horizontal.random import drop_part, numbers_of_rank
from onward.plan.horizontal.cuts import DOMAIN


@lowers("Attention", domain=DOMAIN)
def attention_of_part(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    seen: Tensor | None = None,
    *,
    scale: float,
    is_causal: int = 0,
    dropout_ratio: float = 0.0,
    empty_rows: str = "zero",
    cut_axis: int,
    blocks: tuple[int, ...],
    rank: int,
    size: int,
    training: bool,
) -> Tensor:
    """`onward.fused` attention of a rank's heads; see `onward.lowering.ops.fused_attention`."""
    draws = training and dropout_ratio > 0
    if draws and torch.compiler.is_compiling():
        return _written_out(Q, K, V, attn_mask, seen, scale, bool(is_causal), dropout_ratio, empty_rows, rank)
    with numbers_of_rank(Q.device, rank) if draws else contextlib.nullcontext():
        return attend(
            Q,
            K,
            V,
            attn_mask,
            seen,
            scale=scale,
            is_causal=is_causal,
            dropout_ratio=dropout_ratio,
            empty_rows=empty_rows,
            training=training,
        )


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seen: Tensor | None,
    scale: float,
    is_causal: bool,
    ratio: float,
    empty_rows: str,
    rank: int,
) -> Tensor:
    """The same in steps, for a compiler: it takes dropout of a part as one operator, but no change of generators."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    seen_rows = None if seen is None else seen.reshape((1,) * (4 - seen.dim()) + tuple(seen.shape))
    if seen_rows is not None and empty_rows == "uniform":
        query = query.masked_fill(~seen_rows, 0.0)
    scores = (query @ key.transpose(-1, -2)).float() * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    probabilities: Tensor = drop_part(scores.softmax(-1).to(value.dtype), ratio, rank)[0]
    result = probabilities @ value
    if seen_rows is None or empty_rows == "uniform":
        return result
    return result.masked_fill(~seen_rows, 0.0 if empty_rows == "zero" else math.nan)


simplifies(attention_of_part)(_with_known_mask)

"""Fused attention of a rank's own heads, with dropout inside that differs from rank to rank."""

from __future__ import annotations

import contextlib

from torch import Tensor

from onward.lowering.ops.fused_attention import _with_known_mask
from onward.lowering.ops.fused_attention import attention as attend
from onward.lowering.registry import lowers
from onward.lowering.simplification import simplifies
from onward.parallel.horizontal.random import numbers_of_rank
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


simplifies(attention_of_part)(_with_known_mask)

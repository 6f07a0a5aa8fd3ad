"""Attention of the domain `onward.fused`: one call of torch's kernel, with the meaning of the nodes it stands for.

B batch, H query heads, G key and value heads, L queries, S keys, D and E sizes of a key and a value head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from onward.graph.fusion.rewriting import DOMAIN
from onward.lowering.kernels.attention import attend
from onward.lowering.registry import lowers
from onward.lowering.simplification import simplifies

HIDDEN = -9000.0
"""An added mask of this or less leaves a key no weight: `exp` of it is 0 in every float type."""


@lowers("Attention", domain=DOMAIN)
def attention(
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
    training: bool,
) -> Tensor:
    """`softmax(Q K' scale + mask) V`, with dropout on the probabilities in training.

    Args:
        Q: [B, H, L, D].
        K: [B, G, S, D], where H is a multiple of G.
        V: [B, G, S, E].
        attn_mask: broadcasts to [B, H, L, S]; bool (True: may be looked at) or float (added).
        seen: bool, broadcasts to [B, H, L, 1]: queries that have a key at all; None: all of them.
        scale: of the products.
        is_causal: query i sees the keys 0 to i.
        dropout_ratio: share of the probabilities that are set to zero.
        empty_rows: what a query without a key gives: the mean of all values (`uniform`), `zero` or `nan`.
        training: the network is in training mode.
    """
    query, key, value = Q, K, V
    if seen is not None:
        seen = seen.reshape((1,) * (query.dim() - seen.dim()) + tuple(seen.shape))
        if empty_rows == "uniform":
            # Scores of 0 for every key; and, as with scores replaced by a constant, no gradient to queries and keys.
            query = query.masked_fill(~seen, 0.0)
    result = _attend(query, key, value, attn_mask, scale, bool(is_causal), dropout_ratio if training else 0.0)
    if seen is None or empty_rows == "uniform":
        return result
    return result.masked_fill(~seen, 0.0 if empty_rows == "zero" else math.nan)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool, dropout: float
) -> Tensor:
    device = query.device.type
    dtype = query.dtype
    if torch.is_autocast_enabled(device) and dtype in (torch.float32, torch.float16, torch.bfloat16):
        dtype = torch.get_autocast_dtype(device)
    # float16 arithmetic of the CPU's kernel is off by more than one rounding, and slower than float32.
    computing = torch.float32 if dtype == torch.float16 and device == "cpu" else dtype
    with torch.autocast(device, enabled=False):
        query, key, value = (tensor.to(dtype).to(computing) for tensor in (query, key, value))
        if mask is not None:
            mask = mask.reshape((1,) * (query.dim() - mask.dim()) + tuple(mask.shape))
            mask = mask if mask.dtype == torch.bool else _in_type(mask, computing)
        result = attend(
            query,
            key,
            value,
            mask,
            dropout=dropout,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=query.dim() == 4 and bool(query.shape[1] != key.shape[1]),  # symbolic in a trace
        )
        return result.to(dtype)


def _in_type(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A float mask in another type; the lowest numbers of a wide type become those of a narrow one, not infinite."""
    if torch.finfo(mask.dtype).min >= torch.finfo(dtype).min:
        return mask.to(dtype)
    lowest = torch.finfo(dtype).min
    return torch.where(torch.isinf(mask), mask, mask.clamp(min=lowest)).to(dtype)


@lowers("VisibleRows", domain=DOMAIN)
def visible_rows(mask: Tensor) -> Tensor:
    """(..., L, S) -> bool (..., L, 1): queries that may look at some key, by a bool or an added mask."""
    return (mask if mask.dtype == torch.bool else mask != -math.inf).any(-1, keepdim=True)


@lowers("OpenedMask", domain=DOMAIN)
def opened_mask(mask: Tensor) -> Tensor:
    """A mask in which queries without any key see all of them; for kernels make different things of no key at all."""
    blocked = ~visible_rows(mask)
    return mask | blocked if mask.dtype == torch.bool else mask.masked_fill(blocked, 0.0)


@simplifies(attention)
def _with_known_mask(known: Mapping[str, Any], given: frozenset[str]) -> dict[str, Any]:
    """Nothing is read for a mask that hides nothing, or just what comes later."""
    changes: dict[str, Any] = {}
    seen, mask = known.get("seen"), known.get("attn_mask")
    if seen is not None and bool(seen.all()):
        changes["seen"] = None
    if mask is None or ("seen" in given and "seen" not in changes):
        return changes
    hidden = ~mask if mask.dtype == torch.bool else mask <= HIDDEN
    if mask.dtype != torch.bool and (bool((mask[~hidden] != 0).any()) or bool(hidden.all(-1).any())):
        return changes
    if not bool(hidden.any()):
        return {**changes, "attn_mask": None}
    # A mask of one row, or of one column, may stand for more of them.
    if mask.dim() > 1 and min(mask.shape[-2:]) > 1:
        later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
        if bool((hidden == later).all()):
            return {**changes, "attn_mask": None, "is_causal": 1}
    return changes

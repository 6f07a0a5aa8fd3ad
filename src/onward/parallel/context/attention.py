"""Attention of a rank's own queries with the keys and values of all ranks.

Keys and values are gathered for a layer at a time, and again in its backward pass, so that a rank keeps its own alone.
A rank has two runs of tokens (`onward.plan.context.ranges`); of causal attention each looks only at keys up to its end.
"""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from onward.lowering.registry import lowers
from onward.parallel.context.collectives import gather
from onward.parallel.horizontal.attention import attention_of_part
from onward.parallel.horizontal.random import drop_part
from onward.plan.context.ranges import TokenAxis, ranges_of
from onward.plan.horizontal.cuts import DOMAIN


@lowers("ContextAttention", domain=DOMAIN)
def context_attention(
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
    ranks: int,
    query_blocks: tuple[int, ...],
    query_rows: int = 1,
    key_blocks: tuple[int, ...] = (),
    key_rows: int = 1,
    rank: int = 0,
    size: int = 1,
    cut_axis: int = 0,
    blocks: tuple[int, ...] = (),
    context_rank: int,
    context_group: str,
    training: bool,
) -> Tensor:
    """`onward.fused` attention of the rank's queries; masks have the rows of its queries and the columns of all keys.

    Args:
        Q, K, V: the rank's own; K and V are full where there are no `key_blocks`.
        query_blocks, query_rows, key_blocks, key_rows: that make up the full axis of tokens; see `TokenAxis`.
        rank, size, cut_axis, blocks: of the heads, where tensor-parallel ranks share them.
    """
    if key_blocks:
        K, V = (_lowered(tensor) for tensor in (K, V))
        cut = (2, TokenAxis(key_blocks, key_rows), ranks, context_group)
        full = tuple(gather(tensor, *cut) for tensor in (K, V))
        kept = contextlib.nullcontext() if torch.compiler.is_compiling() else _gathered_again((K, V), full, cut)
        K, V = full
    else:
        kept = contextlib.nullcontext()
    settings: dict[str, Any] = {
        "scale": scale, "dropout_ratio": dropout_ratio, "empty_rows": empty_rows, "cut_axis": 1, "blocks": (),
        "rank": (rank + 1) * _STRIDE + context_rank, "size": 1, "training": training,
    }  # fmt: skip
    with kept:
        if not is_causal:
            return attention_of_part(Q, K, V, attn_mask, seen, **settings)
        queries = TokenAxis(query_blocks, query_rows)
        return _causal(Q, K, V, attn_mask, seen, queries, ranks, context_rank, settings)


def _causal(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None,
    seen: Tensor | None,
    queries: TokenAxis,
    ranks: int,
    context_rank: int,
    settings: dict[str, Any],
) -> Tensor:
    """Each run of the rank's queries with the keys up to its end."""
    results, first, start = [], 0, 0
    for block in queries.blocks:
        for begin, end in ((a * queries.rows, b * queries.rows) for a, b in ranges_of(block, context_rank, ranks)):
            own = slice(first, first + end - begin)
            last = min(start + end, K.shape[2])
            mask = _visible(own.stop - own.start, start + begin, last, Q.device)
            if attn_mask is not None:
                given = attn_mask[..., own, :last] if attn_mask.shape[-2] > 1 else attn_mask[..., :last]
                mask = mask & given if given.dtype == torch.bool else given.masked_fill(~mask, -math.inf)
            rows = seen if seen is None or seen.dim() < 2 or seen.shape[-2] == 1 else seen[..., own, :]
            results.append(attention_of_part(Q[:, :, own], K[:, :, :last], V[:, :, :last], mask, rows, **settings))
            first = own.stop
        start += block * queries.rows
    if settings["training"] and settings["dropout_ratio"] > 0:
        for _ in range(2 * len(queries.blocks) - len(results)):  # chunks that others have: generators stay in step
            drop_part(Q.new_zeros(1), settings["dropout_ratio"], settings["rank"])
    return torch.cat(results, 2)


_STRIDE = 2**21


def _lowered(tensor: Tensor) -> Tensor:
    """What autocast would make of a tensor, before it is sent."""
    is_cast = torch.is_autocast_enabled(tensor.device.type) and tensor.dtype == torch.float32
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if is_cast else tensor


def _gathered_again(
    parts: tuple[Tensor, ...], full: tuple[Tensor, ...], cut: tuple[int, TokenAxis, int, str]
) -> AbstractContextManager[Any]:
    """What is kept of full tensors for the backward pass is the rank's parts, of which it gathers them again, once."""
    places = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(full)}
    own = tuple(part.detach() for part in parts)
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Any:
        index = places.get(tensor.untyped_storage()._cdata)
        return tensor if index is None else (index, tensor.shape, tensor.stride(), tensor.storage_offset())

    def give_back(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if not found:
            with torch.no_grad():
                found.extend(gather(part, *cut) for part in own)
        index, shape, strides, offset = kept
        again: Tensor = found[index].as_strided(shape, strides, offset)
        return again

    return torch.autograd.graph.saved_tensors_hooks(keep, give_back)


def _visible(rows: int, first: int, keys: int, device: torch.device) -> Tensor:
    """Which of the first `keys` keys the queries from `first` on see."""
    return torch.arange(first, first + rows, device=device)[:, None] >= torch.arange(keys, device=device)

"""Attention, FlexAttention and rotary embedding.

B batch, H query heads, G key and value heads, L queries, S keys, D and E sizes of a key and a value head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.attention import attend
from onward.lowering.kernels.dtypes import torch_dtype
from onward.lowering.registry import lowers


@dataclass(frozen=True, kw_only=True)
class _AttentionRules:
    """How scores become probabilities: the attributes of Attention under their own names."""

    scale: float
    softcap: float
    softmax_dtype: torch.dtype | None
    is_causal: bool
    left_window_size: int
    right_window_size: int


@lowers("Attention", since=23)
def attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__Attention.html; outputs, present keys and values, and the scores."""
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key and past_value go together; only one of them is given.")
    if nonpad_kv_seqlen is not None and past_key is not None:
        raise ValueError("nonpad_kv_seqlen belongs to a cache outside of the operator; past_key cannot be given too.")
    packed = Q.dim() == 3
    query, key, value = (
        _split_heads(tensor, heads) for tensor, heads in ((Q, q_num_heads), (K, kv_num_heads), (V, kv_num_heads))
    )
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    rules = _AttentionRules(
        scale=scale if scale is not None else 1 / math.sqrt(query.shape[-1]),
        softcap=softcap,
        softmax_dtype=None
        if softmax_precision is None
        else torch_dtype(softmax_precision, "attribute 'softmax_precision'"),
        is_causal=bool(is_causal),
        left_window_size=left_window_size,
        right_window_size=right_window_size,
    )
    scores = None
    if output_count > 3 or softcap or rules.softmax_dtype not in (None, query.dtype, torch.float32):
        mask = _full_mask(query, key, attn_mask, past, nonpad_kv_seqlen, rules)
        result, scores = _attend_in_steps(query, key, value, mask, rules, qk_matmul_output_mode)
    else:
        result = _attend_fused(query, key, value, attn_mask, past, nonpad_kv_seqlen, rules)
    if packed:
        result = result.transpose(1, 2).flatten(2)
    return (result, key, value) if scores is None else (result, key, value, scores)


def _split_heads(tensor: Tensor, heads: int | None) -> Tensor:
    """(B, L, H D) -> (B, H, L, D); rank 4 is that already."""
    if tensor.dim() == 4:
        return tensor
    if heads is None:
        raise ValueError(f"an input of rank {tensor.dim()} needs the attributes q_num_heads and kv_num_heads.")
    return tensor.reshape(*tensor.shape[:-1], heads, tensor.shape[-1] // heads).transpose(1, 2)


def _attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    past: int,
    lengths: Tensor | None,
    rules: _AttentionRules,
) -> Tensor:
    """torch's own kernel; plain causal attention needs no mask at all."""
    if query.dtype == torch.float16 and query.device.type == "cpu":
        # The kernel's own float16 arithmetic on the CPU is off by more than one rounding, and slower than float32.
        wide = attn_mask.float() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        return _attend_fused(query.float(), key.float(), value.float(), wide, past, lengths, rules).half()
    grouped = query.shape[1] != key.shape[1]
    windowed = rules.left_window_size >= 0 or rules.right_window_size >= 0
    if attn_mask is None and lengths is None and not windowed and (not rules.is_causal or past == 0):
        return attend(query, key, value, None, is_causal=rules.is_causal, scale=rules.scale, enable_gqa=grouped)
    mask = _full_mask(query, key, attn_mask, past, lengths, rules)
    assert mask is not None
    blocked = _fully_masked(mask)
    # What a kernel makes of a query without any key differs; its row is opened here and emptied below.
    opened = mask | blocked if mask.dtype == torch.bool else mask.masked_fill(blocked, 0.0)
    result = attend(query, key, value, opened, scale=rules.scale, enable_gqa=grouped)
    return result.masked_fill(blocked, 0.0)


def _fully_masked(mask: Tensor) -> Tensor:
    """(..., L, 1): whether a query may look at no key."""
    return ~(mask if mask.dtype == torch.bool else mask != -math.inf).any(-1, keepdim=True)


def _full_mask(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, past: int, lengths: Tensor | None, rules: _AttentionRules
) -> Tensor | None:
    """Everything that hides keys in one mask of rank 4: bool (True: look), or a float that is added."""
    queries, keys = query.shape[2], key.shape[2]
    allowed = None
    if rules.is_causal or rules.left_window_size >= 0 or rules.right_window_size >= 0:
        # Distance from a query's own place among the keys; positive: the key is before it.
        place = torch.arange(queries, device=query.device).unsqueeze(-1)
        if lengths is None:
            place = place + past
        else:
            place = place + (lengths.reshape(-1, 1, 1, 1) - queries)
        distance = place - torch.arange(keys, device=query.device)
        for applies, part in (
            (rules.is_causal, distance >= 0),
            (rules.left_window_size >= 0, distance <= rules.left_window_size),
            (rules.right_window_size >= 0, -distance <= rules.right_window_size),
        ):
            if applies:
                allowed = part if allowed is None else allowed & part
    if lengths is not None:
        filled = torch.arange(keys, device=query.device) < lengths.reshape(-1, 1, 1, 1)
        allowed = filled if allowed is None else allowed & filled
    if allowed is not None:
        allowed = allowed.reshape((1,) * (4 - allowed.dim()) + tuple(allowed.shape))
    if attn_mask is None:
        return allowed
    mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
    boolean = mask.dtype == torch.bool
    if mask.shape[-1] != keys and mask.shape[-1] != 1:
        mask = F.pad(mask, (0, keys - mask.shape[-1]), value=False if boolean else -math.inf)
    if allowed is None:
        return mask
    return mask & allowed if boolean else mask.masked_fill(~allowed, -math.inf)


def _attend_in_steps(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rules: _AttentionRules, mode: int
) -> tuple[Tensor, Tensor]:
    """Attention written out; gives the outputs and the scores as `mode` asks: raw, capped, masked, probabilities."""
    repeats = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(repeats, 1) if repeats > 1 else key
    values = value.repeat_interleave(repeats, 1) if repeats > 1 else value
    root = math.sqrt(rules.scale)
    raw = (query * root) @ (keys * root).transpose(-1, -2)
    capped = rules.softcap * torch.tanh(raw / rules.softcap) if rules.softcap else raw
    masked, blocked = capped, None
    if mask is not None:
        blocked = _fully_masked(mask)
        masked = capped.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else capped + mask
    # Rows without a key would give NaN, also in the gradient: they are opened before and emptied after.
    opened = masked if blocked is None else masked.masked_fill(blocked, 0.0)
    weights = torch.softmax(opened, -1, dtype=rules.softmax_dtype).to(query.dtype)
    if blocked is not None:
        weights = weights.masked_fill(blocked, 0.0)
    return weights @ values, (raw, capped, masked, weights)[mode]


@lowers("FlexAttention", domain="ai.onnx.preview")
def flex_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    *,
    prob_mod: Callable[..., tuple[Any, ...]] | None = None,
    scale: float | None = None,
    score_mod: Callable[..., tuple[Any, ...]] | None = None,
    softmax_precision: int | None = None,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx_aionnxpreview_FlexAttention.html; nested graphs change scores and weights."""
    if softmax_precision is not None:
        dtype = torch_dtype(softmax_precision, "attribute 'softmax_precision'")
    else:
        dtype = torch.float64 if Q.dtype == torch.float64 else torch.float32
    repeats = Q.shape[1] // K.shape[1]
    keys = K.repeat_interleave(repeats, 1) if repeats > 1 else K
    values = V.repeat_interleave(repeats, 1) if repeats > 1 else V
    scores = (Q @ keys.transpose(-1, -2)).to(dtype) * (scale if scale is not None else 1 / math.sqrt(Q.shape[-1]))
    if score_mod is not None:
        scores = score_mod(scores)[0]
    weights = torch.softmax(scores, -1)
    if prob_mod is not None:
        weights = prob_mod(weights)[0]
    return weights.to(V.dtype) @ values


@lowers("RotaryEmbedding", since=23)
def rotary_embedding(
    X: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html; rotates the first features of each head."""
    heads_last = X.dim() == 3
    if heads_last and not num_heads:
        raise ValueError("an input of rank 3 needs the attribute num_heads.")
    x = X.reshape(*X.shape[:-1], num_heads, X.shape[-1] // num_heads) if heads_last else X
    if position_ids is not None:
        cos_cache, sin_cache = F.embedding(position_ids, cos_cache), F.embedding(position_ids, sin_cache)
    # (B, L, D/2), with the axis of the heads put where X has it.
    cos, sin = (table.unsqueeze(2 if heads_last else 1) for table in (cos_cache, sin_cache))
    size = rotary_embedding_dim or x.shape[-1]
    if cos.shape[-1] != size // 2:
        raise ValueError(f"the tables hold {cos.shape[-1]} angles; {size} rotated features need {size // 2}.")
    rotated, rest = x[..., :size], x[..., size:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, -1)
    real, imaginary = cos * first - sin * second, sin * first + cos * second
    turned = torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)
    result = torch.cat([turned, rest], -1) if size != x.shape[-1] else turned
    return result.flatten(-2) if heads_last else result

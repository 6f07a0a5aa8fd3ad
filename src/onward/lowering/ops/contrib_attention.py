"""Attention operators of the domain com.microsoft, as ONNX Runtime's optimizer and model builder write them.

Their meaning is that of onnxruntime's documentation (docs/ContribOperators.md) and of its CPU kernels.
B batch, N heads, G key and value heads, L queries, P keys from the past, S all keys, D and E sizes of a key and a
value head.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.graph.nodes.structure import MICROSOFT
from onward.lowering.ops.attention import rotary_embedding
from onward.lowering.registry import lowers


@lowers("Attention", domain=MICROSOFT)
def packed_attention(
    input: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask_index: Tensor | None = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_sequence_length: Tensor | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: tuple[int, ...] | None = None,
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
    output_count: int,
) -> tuple[Tensor, ...]:
    """Self-attention with its projection: input (B, L, H), weights (H, sum of the sizes of Q, K, V), bias alike.

    Outputs (B, L, size of V) and keys and values stacked, (2, B, N, S, D). `mask_index` is a mask (B, S), (B, L, S)
    or (B, 1, max, max) of 0 and 1, or lengths (B) and starts (2 * B) of the sequences.
    """
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise ValueError("rotary embedding and shared buffers inside of Attention are not known; write them out.")
    projected = torch.matmul(input, weights)
    projected = projected if bias is None else projected + bias
    sizes = list(qkv_hidden_sizes) if qkv_hidden_sizes else [weights.shape[1] // 3] * 3
    query, key, value = (_heads(part, num_heads) for part in torch.split(projected, sizes, dim=-1))
    if past is not None:
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
    attended = attend(query, key, value, mask_index, attention_bias, mask_filter_value, scale, bool(unidirectional))
    if output_count == 1:
        return (attended,)
    return attended, torch.stack([key, value])


@lowers("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_sequence_length: Tensor | None = None,
    cache_indirection: Tensor | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: int = 0,
    output_count: int,
) -> tuple[Tensor, ...]:
    """Attention of projected inputs: query (B, L, N*D), key (B, S, N*D) or (B, N, S, D), value alike; bias for all.

    Packed forms: query (B, L, N, 3, D) alone, or key (B, S, N, 2, D) without a value. Outputs (B, L, N*E), and the
    keys and values (B, N, S, D) with the past in front.
    """
    if past_sequence_length is not None or cache_indirection is not None or output_count > 3:
        raise ValueError("shared buffers, beam search and the output 'qk' of MultiHeadAttention are not known.")
    if query.dim() == 5:
        query, key, value = (part.flatten(2) for part in query.unbind(3))
    elif key is not None and key.dim() == 5:
        key, value = (part.flatten(2) for part in key.unbind(3))
    if key is None or value is None:
        raise ValueError("MultiHeadAttention needs key and value, or one of the packed forms.")
    if bias is not None:
        query, key, value = _add_biases(query, key, value, bias)
    q, k, v = (part if part.dim() == 4 else _heads(part, num_heads) for part in (query, key, value))
    if past_key is not None and past_value is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    attended = attend(q, k, v, key_padding_mask, attention_bias, mask_filter_value, scale, bool(unidirectional))
    return (attended, k, v)[:output_count]


def _add_biases(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bias of Q, and of K and V where these are not split into heads already (keys of another sequence)."""
    size = query.shape[-1]
    if key.dim() == 4:
        return query + bias[:size], key, value
    return query + bias[:size], key + bias[size : 2 * size], value + bias[2 * size :]


def _heads(tensor: Tensor, heads: int) -> Tensor:
    """(B, L, N*D) -> (B, N, L, D)."""
    return tensor.reshape(*tensor.shape[:2], heads, -1).transpose(1, 2)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    filter_value: float,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attention of heads (B, N, L, D) with keys (B, N, S, D) -> (B, L, N*E).

    A masked key gets `filter_value` added to its score, as onnxruntime does; `causal` hides what comes later.
    """
    queries, keys = query.shape[2], key.shape[2]
    factor = scale if scale else 1 / math.sqrt(query.shape[-1])
    added = None if bias is None else bias
    if mask is not None:
        hidden = _hidden_keys(mask, query.shape[0], keys).to(query.dtype) * filter_value
        added = hidden if added is None else added + hidden
    plain = causal and added is None and queries == keys
    if causal and not plain:
        places = torch.arange(queries, device=query.device)[:, None] + (keys - queries)
        later = torch.arange(keys, device=query.device) > places
        least = torch.finfo(query.dtype).min
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        added = torch.where(later, least, zero if added is None else added)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=added, is_causal=plain, scale=factor)
    return attended.transpose(1, 2).flatten(2)


def _hidden_keys(mask: Tensor, batch: int, keys: int) -> Tensor:
    """1 where a key is hidden, 0 elsewhere; broadcasts to (B, N, L, S)."""
    places = torch.arange(keys, device=mask.device)
    if mask.dim() == 1:
        hidden = places >= mask[:batch, None]
        if mask.shape[0] == 2 * batch:
            hidden = hidden | (places < mask[batch:, None])
        elif mask.shape[0] != batch:
            raise ValueError(f"a mask of {mask.shape[0]} numbers for {batch} sequences: expected lengths, or two each.")
        return hidden[:, None, None]
    hidden = mask == 0
    if mask.dim() == 2:
        return hidden[:, None, None]
    if mask.dim() == 3:
        return hidden[:, None]
    raise ValueError(f"a mask of shape {list(mask.shape)}: expected rank 1, 2 or 3.")


@lowers("RotaryEmbedding", domain=MICROSOFT)
def microsoft_rotary_embedding(
    input: Tensor,
    position_ids: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Tensor:
    """Rotates pairs of features: input (B, L, N*D) or (B, N, L, D), tables (rows, D/2).

    `position_ids` is (B, L), or one number, the place of the first token. Without `num_heads` a head has twice as
    many features as the tables have columns.
    """
    length = input.shape[1] if input.dim() == 3 else input.shape[2]
    if position_ids.numel() == 1 and position_ids.dim() < 2:
        position_ids = (position_ids.reshape(1, 1) + torch.arange(length, device=input.device)).expand(
            input.shape[0], -1
        )
    heads = num_heads
    if input.dim() == 3 and not heads:
        heads = input.shape[2] // (2 * cos_cache.shape[1])
    return rotary_embedding(
        input,
        cos_cache,
        sin_cache,
        position_ids,
        interleaved=interleaved,
        num_heads=heads,
        rotary_embedding_dim=rotary_embedding_dim,
    )


@lowers("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    seqlens_k: Tensor,
    total_sequence_length: Tensor,
    cos_cache: Tensor | None = None,
    sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    attention_bias: Tensor | None = None,
    head_sink: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    *,
    causal: int = 1,
    do_rotary: int = 0,
    k_quant_type: str = "NONE",
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    qk_norm_epsilon: float = 1e-6,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    sliding_window_cache: int = 0,
    smooth_softmax: int = 0,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
    output_count: int,
) -> tuple[Tensor, ...]:
    """Attention of N query heads on G key and value heads, causal or not, with a cache and rotary embedding.

    query (B, L, N*D), or Q, K and V side by side; past_key (B, G, P, D); `seqlens_k` (B) is the number of keys of
    each sequence, past ones included, less one. Outputs (B, L, N*D) and the keys and values (B, G, S, D): a
    sequence's past, then its new keys. Padding is at the end of a sequence. Tables of fewer than D / 2 angles rotate
    the first features of a head; `head_sink` (N) is one more score of each head, of a key without a value.
    """
    has_past = past_key is not None and past_value is not None and bool(past_key.shape[2])
    if k_scale is not None or v_scale is not None or {k_quant_type, v_quant_type} != {"NONE"}:
        raise ValueError("GroupQueryAttention with a quantized cache is not known.")
    if has_past and sliding_window_cache:
        raise ValueError("GroupQueryAttention with a past in buffers of the window's size is not known.")
    q, k, v = _query_key_value(query, key, value, num_heads, kv_num_heads)
    q, k = _head_norm(q, q_norm_weight, qk_norm_epsilon), _head_norm(k, k_norm_weight, qk_norm_epsilon)
    length = query.shape[1]
    before = (seqlens_k.reshape(-1).to(torch.int64) + 1 - length).clamp(min=0)
    places = before[:, None] + torch.arange(length, device=query.device)
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise ValueError("do_rotary needs cos_cache and sin_cache.")
        # Rows of padding may count beyond the tables; what they hold is never attended to.
        at = (places if position_ids is None else position_ids).clamp(max=cos_cache.shape[0] - 1)
        turned = partial(rotary_embedding, interleaved=rotary_interleaved, rotary_embedding_dim=2 * cos_cache.shape[1])
        q, k = (turned(x, cos_cache, sin_cache, at) for x in (q, k))
    if has_past and past_key is not None and past_value is not None:
        k, v = _append(past_key, k, before), _append(past_value, v, before)
    seen = torch.arange(k.shape[2], device=query.device)
    distance = places[:, :, None] - seen
    allowed = distance >= 0 if causal else (seen <= seqlens_k.reshape(-1, 1, 1)).expand_as(distance)
    if local_window_size > 0:
        allowed = allowed & (distance < local_window_size)
    sink = q.new_zeros(num_heads) if smooth_softmax and head_sink is None else head_sink
    attended = _attend_grouped(q, k, v, allowed[:, None], attention_bias, scale, softcap, sink)
    return (attended, k, v)[:output_count]


def _head_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """RMS normalization of each head's features, where it has a weight."""
    return x if weight is None else F.rms_norm(x, x.shape[-1:], weight, epsilon)


def _query_key_value(
    query: Tensor, key: Tensor | None, value: Tensor | None, heads: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    if key is not None and value is not None:
        return _heads(query, heads), _heads(key, groups), _heads(value, groups)
    size = query.shape[-1] // (heads + 2 * groups)
    q, k, v = torch.split(query, [heads * size, groups * size, groups * size], dim=-1)
    return _heads(q, heads), _heads(k, groups), _heads(v, groups)


def _append(past: Tensor, new: Tensor, before: Tensor) -> Tensor:
    """Each sequence's new keys right after its `before` past ones: (B, G, P + L, D) as far as keys reach."""
    keys = past.shape[2] + new.shape[2]
    place = torch.arange(keys, device=past.device)
    from_new = (place - before[:, None]).clamp(0, new.shape[2] - 1)
    new_rows = new.gather(2, from_new[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))
    old_rows = F.pad(past, (0, 0, 0, new.shape[2]))
    return torch.where((place < before[:, None])[:, None, :, None], old_rows, new_rows)


def _attend_grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    sink: Tensor | None = None,
) -> Tensor:
    factor = scale if scale else 1 / math.sqrt(q.shape[-1])
    if softcap or sink is not None:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.matmul(q, k.transpose(-1, -2)) * factor
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = (scores if bias is None else scores + bias).masked_fill(~allowed, -math.inf)
        if sink is not None:
            scores = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
        weights = torch.softmax(scores, -1)[..., : k.shape[2]]
        return torch.matmul(weights, v).transpose(1, 2).flatten(2)
    mask = allowed if bias is None else bias.masked_fill(~allowed, -math.inf)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=factor, enable_gqa=True)
    return attended.transpose(1, 2).flatten(2)

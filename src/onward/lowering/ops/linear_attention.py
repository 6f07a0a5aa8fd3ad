"""Attention with a state instead of keys: LinearAttention, and the causal convolution that goes before it.

B batch, H query heads, G key and value heads, T steps, D and E sizes of a key and a value head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.convolution_gradients import convolution
from onward.lowering.registry import lowers

_RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}
"""Update rule -> (the state decays, what is written is corrected by what is read)."""


@lowers("LinearAttention", since=27)
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    chunk_size: int = 64,
    kv_num_heads: int,
    q_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__LinearAttention.html; step by step, in float32 at least."""
    if update_rule not in _RULES:
        raise ValueError(f"update_rule {update_rule!r} is not known; expected one of {', '.join(_RULES)}.")
    gated, corrected = _RULES[update_rule]
    if gated != (decay is not None) or corrected != (beta is not None):
        raise ValueError(
            f"update_rule {update_rule!r} {'needs' if gated else 'takes no'} decay and "
            f"{'needs' if corrected else 'takes no'} beta."
        )
    if kv_num_heads < 1 or q_num_heads % kv_num_heads:
        raise ValueError(f"q_num_heads {q_num_heads} is not a multiple of kv_num_heads {kv_num_heads}.")
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    queries = _split_heads(query, q_num_heads).to(wide)
    keys, values = (_split_heads(tensor, kv_num_heads).to(wide) for tensor in (key, value))
    group = q_num_heads // kv_num_heads
    size = queries.shape[-1]
    if past_state is None:
        state = values.new_zeros(query.shape[0], kv_num_heads, size, values.shape[-1])
    else:
        state = past_state.to(wide)
    # (B, T, G, 1 or D) and (B, T, G or 1, 1)
    gates = None if decay is None else _split_heads(decay, kv_num_heads).to(wide).exp()
    rates = None if beta is None else beta.unsqueeze(-1).to(wide)
    outputs = []
    for step in range(query.shape[1]):
        if gates is not None:
            state = state * gates[:, step].unsqueeze(-1)
        written = values[:, step]
        if rates is not None:
            written = rates[:, step] * (written - torch.einsum("bgde,bgd->bge", state, keys[:, step]))
        state = state + keys[:, step].unsqueeze(-1) * written.unsqueeze(-2)
        shared = state.repeat_interleave(group, 1) if group > 1 else state
        outputs.append(torch.einsum("bhd,bhde->bhe", queries[:, step], shared))
    result = torch.stack(outputs, 1).flatten(2) * (scale or 1 / math.sqrt(size))
    return result.to(query.dtype), state.to(query.dtype if past_state is None else past_state.dtype)


def _split_heads(tensor: Tensor, heads: int) -> Tensor:
    """(B, T, H D) -> (B, T, H, D)."""
    return tensor.reshape(*tensor.shape[:-1], heads, tensor.shape[-1] // heads)


@lowers("CausalConvWithState", since=27)
def causal_conv_with_state(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
    *,
    activation: str = "none",
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__CausalConvWithState.html; (B, channels, T), each channel by itself."""
    if activation not in ("none", "silu", "swish"):
        raise ValueError(f"activation {activation!r} is not known; expected silu, swish or none.")
    before = weight.shape[-1] - 1
    padded = F.pad(input, (before, 0)) if past_state is None else torch.cat([past_state, input], -1)
    result = convolution(padded, weight, bias, (1,), (0,), (1,), weight.shape[0])
    state = padded.narrow(-1, padded.shape[-1] - before, before)
    return (result if activation == "none" else F.silu(result)), state

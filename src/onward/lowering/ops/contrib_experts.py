"""Mixture of experts of the domain com.microsoft: every token goes through the few experts that its router chose.

Its meaning is that of onnxruntime's documentation (docs/ContribOperators.md) and of its CPU kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.graph.nodes.structure import MICROSOFT
from onward.lowering.registry import lowers

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "identity": lambda x: x,
}


@lowers("MoE", domain=MICROSOFT)
def mixture_of_experts(
    input: Tensor,
    router_probs: Tensor,
    fc1_experts_weights: Tensor,
    fc1_experts_bias: Tensor | None,
    fc2_experts_weights: Tensor,
    fc2_experts_bias: Tensor | None = None,
    fc3_experts_weights: Tensor | None = None,
    fc3_experts_bias: Tensor | None = None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    k: int = 1,
    normalize_routing_weights: int = 0,
    swiglu_fusion: int = 0,
    swiglu_limit: float = torch.inf,
    use_sparse_mixer: int = 0,
) -> Tensor:
    """Tokens (T, H) or (B, L, H), router's logits (T, E), weights (E, I, H) of fc1 and fc3 and (E, H, I) of fc2.

    The softmax of the logits weighs the k best experts; with `normalize_routing_weights` their weights sum to 1.
    `swiglu` takes fc1 of 2 * I rows: gate and value alternate (`swiglu_fusion` 1), or follow each other (2).
    """
    if use_sparse_mixer or fc3_experts_weights is not None or fc3_experts_bias is not None:
        raise ValueError("MoE with a sparse mixer or with fc3 is not known.")
    if activation_type != "swiglu" and activation_type not in _ACTIVATIONS:
        raise ValueError(
            f"activation_type {activation_type!r} is not known; expected swiglu, {', '.join(_ACTIVATIONS)}."
        )
    tokens = input.flatten(0, -2)
    shares, chosen = torch.softmax(router_probs, dim=-1).topk(k, dim=-1)
    if normalize_routing_weights:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    result = torch.zeros_like(tokens)
    for expert in range(fc1_experts_weights.shape[0]):
        rows, places = torch.where(chosen == expert)
        hidden = F.linear(tokens[rows], fc1_experts_weights[expert], _of(fc1_experts_bias, expert))
        if activation_type == "swiglu":
            hidden = _swiglu(hidden, activation_alpha, activation_beta, swiglu_limit, swiglu_fusion)
        else:
            hidden = _ACTIVATIONS[activation_type](hidden)
        output = F.linear(hidden, fc2_experts_weights[expert], _of(fc2_experts_bias, expert))
        weighed = output * shares[rows, places].unsqueeze(-1)
        result = result.index_add(0, rows, weighed.to(result.dtype))  # autocast multiplies in 16 bits
    return result.reshape(input.shape)


def _of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]


def _swiglu(x: Tensor, alpha: float, beta: float, limit: float, fusion: int) -> Tensor:
    """gate * sigmoid(alpha * gate) * (value + beta), the gate cut above the limit, the value on both sides."""
    if fusion not in (1, 2):
        raise ValueError(
            f"swiglu_fusion is {fusion}; 1 (gate and value alternate) and 2 (one after the other) are known."
        )
    gate, value = (x[..., ::2], x[..., 1::2]) if fusion == 1 else x.chunk(2, dim=-1)
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (value + beta)

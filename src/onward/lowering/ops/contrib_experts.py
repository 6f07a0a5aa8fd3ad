"""Mixture of experts of the domain com.microsoft: every token goes through the few experts that its router chose.

`onward.graph.fusion.contributed_experts` says what its attributes mean.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from onward.graph.fusion.contributed_experts import body_attributes
from onward.graph.nodes.structure import MICROSOFT
from onward.lowering.kernels.short_rows import softmax
from onward.lowering.ops.fused_experts import experts
from onward.lowering.registry import lowers


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
    swiglu_limit: float = math.inf,
    use_sparse_mixer: int = 0,
) -> Tensor:
    """Tokens (T, H) or (B, L, H), router's logits (T, E), weights (E, I, H) of fc1 and fc3 and (E, H, I) of fc2.

    The softmax of the logits weighs the k best experts; with `normalize_routing_weights` their weights sum to 1.
    The hidden layer is `activation(fc1(x))`, with fc3 times `fc3(x)`; `swiglu` without fc3 takes fc1 of 2 * I rows.
    """
    if use_sparse_mixer:
        raise ValueError("MoE with a sparse mixer is not known.")
    has_fc3 = fc3_experts_weights is not None
    body: dict[str, Any] = dict(
        body_attributes(activation_type, has_fc3, swiglu_fusion, activation_alpha, activation_beta, swiglu_limit)
    )
    shares, chosen = softmax(router_probs, -1).topk(k, dim=-1)
    if normalize_routing_weights:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    matrices = [fc1_experts_weights, *((fc3_experts_weights,) if has_fc3 else ()), fc2_experts_weights]
    biases = [fc1_experts_bias, *((fc3_experts_bias,) if has_fc3 else ()), fc2_experts_bias]
    is_biased = any(bias is not None for bias in biases)
    if is_biased:
        matrices += [m.new_zeros(m.shape[:2]) if b is None else b for b, m in zip(biases, matrices, strict=True)]
    return experts(
        input, chosen, shares, *matrices, experts=len(fc1_experts_weights), rows_are_outputs=1,
        is_biased=int(is_biased), training=False, **body,
    )  # fmt: skip

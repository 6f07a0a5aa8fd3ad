"""Adam's direction, and Adam and AdamW without bias correction, which torch's do not have."""

from __future__ import annotations

from typing import Any

import torch

from onward.optim.slotted_optimizer import Slots, SlottedOptimizer, corrections, new_count, zeros_like
from onward.optim.weight_shards import Tensors


class AdamSlots(SlottedOptimizer):
    """Has the slots of torch's Adam: `exp_avg`, `exp_avg_sq`, and `step`, a 0-d float32."""

    def new_slots(self, group: dict[str, Any], weight: torch.Tensor) -> Slots:
        """Zeros."""
        return {"step": new_count(weight), "exp_avg": zeros_like(weight), "exp_avg_sq": zeros_like(weight)}


def directions(optimizer: AdamSlots, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> Tensors:
    """The quotients of the moments after a gradient, corrected where the group says so; updates the moments."""
    alpha, beta = group["betas"]
    counts, first, second = (optimizer.slots(weights, name) for name in ("step", "exp_avg", "exp_avg_sq"))
    torch._foreach_add_(counts, 1)
    torch._foreach_mul_(first, alpha)
    torch._foreach_add_(first, gradients, alpha=1 - alpha)
    torch._foreach_mul_(second, beta)
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta)
    means, spreads = first, second
    if group["do_bias_correction"]:
        means = list(torch._foreach_div(first, corrections(counts, alpha, weights[0])))
        spreads = list(torch._foreach_div(second, corrections(counts, beta, weights[0])))
    spreads = list(torch._foreach_sqrt(spreads))
    torch._foreach_add_(spreads, group["eps"])
    return list(torch._foreach_div(means, spreads))


class AdamAsAsked(AdamSlots):
    """Adam or AdamW whose groups correct the bias of the moments or do not (`do_bias_correction`).

    Without the correction m / (sqrt(v) + eps) is the direction: what the original program for BERT computed. In groups
    with `decouples_decay`, `weight_decay` shrinks the weight (AdamW); in others it is added to the gradient (Adam).
    """

    def update(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        """Decays as the group says, and moves in Adam's direction."""
        decay, rate = group["weight_decay"], group["lr"]
        if decay and not group["decouples_decay"]:
            gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
        moves = directions(self, group, weights, gradients)
        if decay and group["decouples_decay"]:
            torch._foreach_mul_(weights, 1 - rate * decay)
        torch._foreach_add_(weights, moves, alpha=-rate)

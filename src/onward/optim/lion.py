"""The Lion optimizer, which torch does not have: it moves every element by the learning rate."""

from __future__ import annotations

from typing import Any

import torch

from onward.optim.slotted_optimizer import Slots, SlottedOptimizer, zeros_like
from onward.optim.weight_shards import Tensors


class Lion(SlottedOptimizer):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), algorithm 2.

    For every weight w with gradient g:

        w = w - lr * (sign(alpha * m + (1 - alpha) * g) + weight_decay * w)
        m = beta * m + (1 - beta) * g

    State of every weight: `exp_avg` (m).
    """

    def new_slots(self, group: dict[str, Any], weight: torch.Tensor) -> Slots:
        """Zeros."""
        return {"exp_avg": zeros_like(weight)}

    def update(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        """Moves by the sign; the momentum is updated afterwards."""
        (alpha, beta), rate, momentum = group["betas"], group["lr"], self.slots(weights, "exp_avg")
        moves = list(torch._foreach_mul(momentum, alpha))
        torch._foreach_add_(moves, gradients, alpha=1 - alpha)
        torch._foreach_sign_(moves)
        torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
        torch._foreach_add_(weights, moves, alpha=-rate)
        torch._foreach_mul_(momentum, beta)
        torch._foreach_add_(momentum, gradients, alpha=1 - beta)

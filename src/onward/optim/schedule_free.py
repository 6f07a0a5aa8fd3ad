"""AdamW without a schedule: gradients are taken between the steps that it makes and their average, the result."""

from __future__ import annotations

from typing import Any

import torch

from onward.optim.slotted_optimizer import Slots, SlottedOptimizer, corrections, zeros_like
from onward.optim.weight_shards import Tensors


class AdamWScheduleFree(SlottedOptimizer):
    """Defazio et al. 2024, "The Road Less Scheduled" (arXiv 2405.15682), as in the package schedulefree.

    The weight that is trained is y. At update t = 1, 2, ..., with gradient g at y, and c = w / (sum of all w so far)
    where w is the square of the largest learning rate so far:

        v = beta * v + (1 - beta) * g**2
        d = g / (sqrt(v / (1 - beta**t)) + eps) + weight_decay * y
        z = z - lr * d
        x = (1 - c) * x + c * z
        y = (1 - alpha) * z + alpha * x

    x is what is to be evaluated and exported; it follows from y and z and is not kept (`average_of`).

    State of every weight: `z`, `exp_avg_sq` (v), `step` (t), `largest_rate` and `rate_squares` (the sum of w).
    """

    def new_slots(self, group: dict[str, Any], weight: torch.Tensor) -> Slots:
        """z begins as the weight; all else is zero."""
        numbers = {name: torch.zeros((), dtype=torch.float64) for name in ("step", "largest_rate", "rate_squares")}
        return {"z": weight.detach().clone(), "exp_avg_sq": zeros_like(weight), **numbers}

    def update(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        """Updates weights one by one: each counts its own updates."""
        (alpha, beta), rate = group["betas"], group["lr"]
        for weight, gradient in zip(weights, gradients, strict=True):
            slots = self.state[weight]
            steps, second = slots["z"], slots["exp_avg_sq"]
            slots["step"] += 1
            slots["largest_rate"].clamp_(min=rate)
            slots["rate_squares"] += slots["largest_rate"].square()
            # Before the first rate above 0 nothing moves, whatever the share.
            share = slots["largest_rate"].square() / slots["rate_squares"].clamp(min=torch.finfo(torch.float64).tiny)
            second.mul_(beta).addcmul_(gradient, gradient, value=1 - beta)
            (correction,) = corrections([slots["step"]], beta, weight)
            move = gradient / second.div(correction).sqrt_().add_(group["eps"])
            move.add_(weight, alpha=group["weight_decay"])
            weight.lerp_(steps, share.to(weight))
            weight.add_(move * (rate * (alpha * (1 - share) - 1)).to(weight))
            steps.sub_(move, alpha=rate)

    @torch.no_grad()
    def average_of(self, weight: torch.Tensor) -> torch.Tensor:
        """x, of the shape of this rank's shard."""
        alpha = next(group["betas"][0] for group in self.param_groups if any(weight is one for one in group["params"]))
        return torch.lerp(weight.detach(), self.state[weight]["z"], 1 - 1 / alpha)

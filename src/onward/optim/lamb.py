"""The LAMB optimizer, which torch does not have: Adam's direction, scaled for every weight tensor by the ratio of the
norms of weight and direction. For training with large batches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from onward.optim.adam import AdamSlots, directions
from onward.optim.weight_shards import UNSHARDED, Tensors, WeightShards


class Lamb(AdamSlots):
    """You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv 1904.00962),
    algorithm 2, with the options of ONNX Runtime's LambOptimizer.

    For every weight tensor w with gradient g, at update t = 1, 2, ...:

        m = alpha * m + (1 - alpha) * g
        v = beta * v + (1 - beta) * g**2
        d = (m / c1) / (sqrt(v / c2) + eps) + weight_decay * w
        w = w - lr * ratio * d

    with c1 = 1 - alpha**t and c2 = 1 - beta**t under bias correction, else both 1, and
    ratio = ||w|| / ||d|| within [ratio_min, ratio_max], or 1 where either norm is zero.

    State of every weight: `exp_avg` (m), `exp_avg_sq` (v), both of the weight's shape and dtype, and `step` (t, 0-d
    float32, on the CPU unless it was put elsewhere). Nothing here waits for the device.

    Args:
        params: float32 or float64 tensors (lower precision is trained through float32 masters), or groups of them.
        lr: learning rate.
        betas: alpha and beta.
        eps: added to the denominator.
        weight_decay: lambda, decoupled from the gradient.
        ratio_min, ratio_max: bounds of the ratio; unbounded by default.
        shards: what the weights are shards of.
        do_bias_correction: off by default, as in ONNX Runtime's runner.

    Raises:
        ValueError: an option out of range, or a weight of another dtype.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        do_bias_correction: bool = False,
        shards: WeightShards = UNSHARDED,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "do_bias_correction": do_bias_correction,
        }
        super().__init__(params, defaults, shards)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Checks a group's options and dtypes, and adds it."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if not group["ratio_min"] <= group["ratio_max"]:
            raise ValueError(f"ratio_min {group['ratio_min']} is above ratio_max {group['ratio_max']}")

    def update(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        """Adam's direction with decay, scaled by the ratio."""
        moves = directions(self, group, weights, gradients)
        if group["weight_decay"] != 0:
            torch._foreach_add_(moves, weights, alpha=group["weight_decay"])
        ratios = self._trust_ratios(weights, moves, group["ratio_min"], group["ratio_max"])
        torch._foreach_mul_(moves, list((ratios * -group["lr"]).unbind()))
        torch._foreach_add_(weights, moves)

    def _trust_ratios(self, weights: Tensors, moves: Tensors, minimum: float, maximum: float) -> torch.Tensor:
        counted = [self.shards.counted(weights, tensors) for tensors in (weights, moves)]
        norms = torch.stack([torch.stack(list(torch._foreach_norm(tensors))) for tensors in counted])
        if self.shards is not UNSHARDED:
            norms = self.shards.sum_over_shards(weights, norms.square()).sqrt()
        weight_norms, direction_norms = norms.unbind()
        ratios = (weight_norms / direction_norms).clamp(minimum, maximum)
        return torch.where((weight_norms > 0) & (direction_norms > 0), ratios, torch.ones_like(ratios))

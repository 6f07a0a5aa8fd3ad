"""The LAMB optimizer, which torch does not have: Adam's direction, scaled for every weight tensor by the ratio of the
norms of weight and direction. For training with large batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch.optim.optimizer import Optimizer

Tensors = list[torch.Tensor]


class Lamb(Optimizer):
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
        sum_over_parts: where weights are parts of larger ones: (weights, sums of squares of a tensor of each of them,
            along the last axis) -> the same sums over the full weights.
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
        sum_over_parts: Callable[[Tensors, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.sum_over_parts = sum_over_parts
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "do_bias_correction": do_bias_correction,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Checks a group's options and dtypes, and adds it."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        alpha, beta = group["betas"]
        if not (0 <= alpha < 1 and 0 <= beta < 1):
            raise ValueError(f"betas are {alpha:g} and {beta:g}; expected both from 0 up to, not including, 1")
        for name in ("lr", "eps", "weight_decay"):
            if not group[name] >= 0:
                raise ValueError(f"{name} is {group[name]}; expected 0 or more")
        if not group["ratio_min"] <= group["ratio_max"]:
            raise ValueError(f"ratio_min {group['ratio_min']} is above ratio_max {group['ratio_max']}")
        for weight in group["params"]:
            if weight.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"a weight of {weight.dtype}; LAMB updates float32 masters (or float64)")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every weight that has a gradient. Returns what `closure`, if given, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            batches: dict[tuple[torch.device, torch.dtype], Tensors] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    batches.setdefault((weight.device, weight.dtype), []).append(weight)
            for weights in batches.values():
                self._update(group, weights)
        return loss

    def _update(self, group: dict[str, Any], weights: Tensors) -> None:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["step"] = torch.zeros((), dtype=torch.float32)
                self.state[weight]["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
                self.state[weight]["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        states = [self.state[weight] for weight in weights]
        torch._foreach_add_([state["step"] for state in states], 1)
        directions = _directions(group, weights, states)
        ratios = self._trust_ratios(weights, directions, group["ratio_min"], group["ratio_max"])
        torch._foreach_mul_(directions, list((ratios * -group["lr"]).unbind()))
        torch._foreach_add_(weights, directions)

    def _trust_ratios(self, weights: Tensors, directions: Tensors, minimum: float, maximum: float) -> torch.Tensor:
        weight_norms = torch.stack(list(torch._foreach_norm(weights)))
        direction_norms = torch.stack(list(torch._foreach_norm(directions)))
        if self.sum_over_parts is not None:
            squares = torch.stack([weight_norms, direction_norms]).square()
            weight_norms, direction_norms = self.sum_over_parts(weights, squares).sqrt().unbind()
        ratios = (weight_norms / direction_norms).clamp(minimum, maximum)
        return torch.where((weight_norms > 0) & (direction_norms > 0), ratios, torch.ones_like(ratios))


def _directions(group: dict[str, Any], weights: Tensors, states: list[dict[str, torch.Tensor]]) -> Tensors:
    alpha, beta = group["betas"]
    gradients = [weight.grad.to(weight.dtype) for weight in weights if weight.grad is not None]
    first = [state["exp_avg"] for state in states]
    second = [state["exp_avg_sq"] for state in states]
    torch._foreach_mul_(first, alpha)
    torch._foreach_add_(first, gradients, alpha=1 - alpha)
    torch._foreach_mul_(second, beta)
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta)
    directions, denominators = first, second
    if group["do_bias_correction"]:
        # In float64: the first corrections are small differences of numbers close to 1.
        updates = torch.stack([state["step"] for state in states]).double()
        corrections = [(1 - decay**updates).to(weights[0], non_blocking=True).unbind() for decay in (alpha, beta)]
        directions = list(torch._foreach_div(first, list(corrections[0])))
        denominators = list(torch._foreach_div(second, list(corrections[1])))
    denominators = list(torch._foreach_sqrt(denominators))
    torch._foreach_add_(denominators, group["eps"])
    directions = list(torch._foreach_div(directions, denominators))
    if group["weight_decay"] != 0:
        torch._foreach_add_(directions, weights, alpha=group["weight_decay"])
    return directions

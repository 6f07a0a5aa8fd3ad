"""Muon, for matrices of hidden layers, and AdamW for all other weights, as one optimizer.

torch.optim.Muon takes full matrices only; here a rank may hold shards of them, of which the momentum stays sharded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from onward.optim.adam import AdamAsAsked
from onward.optim.slotted_optimizer import Slots, zeros_like
from onward.optim.weight_shards import Tensors

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial that is iterated: its slope at 0 is steep, so that few iterations suffice."""
ITERATIONS = 5
LEAST_NORM = 1e-7


class Muon(AdamAsAsked):
    """Jordan et al. 2024 (kellerjordan.github.io/posts/muon), scaled as in Liu et al. 2025 (arXiv 2502.16982).

    Groups with `use_muon` hold matrices. For each of R x C elements with gradient g:

        m = momentum * m + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * m  if nesterov else m
        w = w - lr * (0.2 * sqrt(max(R, C)) * O(u) + weight_decay * w)

    where O(u) is the nearest matrix to u whose singular values are all 1, approximately: what torch.optim.Muon
    computes with `adjust_lr_fn="match_rms_adamw"`. With that factor, elements move about as far as with AdamW, so that
    learning rate and weight decay are the same for groups without `use_muon`, which AdamW updates.

    State of every matrix: `momentum_buffer` (m). Where ranks hold shards of a matrix, each gathers u, and one computes
    O(u) for all.
    """

    def new_slots(self, group: dict[str, Any], weight: torch.Tensor) -> Slots:
        """Zeros."""
        if group["use_muon"]:
            return {"momentum_buffer": zeros_like(weight)}
        return super().new_slots(group, weight)

    def update(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        """Updates as many matrices at a time as ranks hold shards of each."""
        if not group["use_muon"]:
            return super().update(group, weights, gradients)
        rate, momentum = group["lr"], group["momentum"]
        directions: Tensors = []
        for gradient, average in zip(gradients, self.slots(weights, "momentum_buffer"), strict=True):
            average.lerp_(gradient, 1 - momentum)
            directions.append(gradient.lerp(average, momentum) if group["nesterov"] else average)
        together = itertools.groupby(zip(weights, directions, strict=True), lambda one: self.shards.holders(one[0]))
        for (own, count), members in together:
            while some := list(itertools.islice(members, count)):
                self._update_some(group, rate, own, some)
        return None

    def _update_some(
        self, group: dict[str, Any], rate: float, own: int, some: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Updates as many matrices as ranks hold shards of them: each rank iterates for one, and all get the result."""
        fulls = [self.shards.gather(weight, direction) for weight, direction in some]
        if own < len(fulls):
            fulls[own] = orthogonalized(fulls[own]).to(fulls[own].dtype)
        for number, (weight, _) in enumerate(some):
            found = self.shards.from_holder(weight, number, fulls[number])
            scale = 0.2 * math.sqrt(max(found.shape))
            weight.mul_(1 - rate * group["weight_decay"])
            weight.add_(self.shards.own_shard(weight, found), alpha=-rate * scale)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix with the same singular vectors and singular values near 1, by Newton and Schulz's iteration, in bf16."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.bfloat16().T if is_tall else matrix.bfloat16()
    found = found / found.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found

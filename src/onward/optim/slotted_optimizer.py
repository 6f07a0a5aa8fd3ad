"""What onward's own optimizers share: slots that exist from the beginning, updates of weights that have a gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch.optim.optimizer import Optimizer

from onward.optim.weight_shards import UNSHARDED, Tensors, WeightShards

Slots = dict[str, torch.Tensor]


class SlottedOptimizer(Optimizer):
    """An optimizer of which a subclass gives the first slots of a weight, and the update of a group.

    Args:
        params: float32 or float64 tensors (lower precision is trained through float32 masters), or groups of them.
        defaults: of the options of a group.
        shards: what the weights are shards of.

    Raises:
        ValueError: an option out of range, or a weight of another dtype.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        shards: WeightShards = UNSHARDED,
    ) -> None:
        self.shards = shards
        super().__init__(params, defaults)

    @abstractmethod
    def new_slots(self, group: dict[str, Any], weight: torch.Tensor) -> Slots:
        """The slots of a weight before its first update."""

    @abstractmethod
    def update(self, group: dict[str, Any], weights: Tensors, gradients: Tensors) -> None:
        """Updates weights of one device and dtype, whose gradients have it too."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Checks a group's options and dtypes, and adds it with its slots."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if not all(0 <= beta < 1 for beta in group.get("betas", ())):
            listed = " and ".join(f"{beta:g}" for beta in group["betas"])
            raise ValueError(f"betas are {listed}; expected both from 0 up to, not including, 1")
        for name in ("lr", "eps", "weight_decay"):
            if isinstance(group.get(name), float) and not group[name] >= 0:
                raise ValueError(f"{name} is {group[name]}; expected 0 or more")
        for weight in group["params"]:
            if weight.dtype not in (torch.float32, torch.float64):
                name = type(self).__name__
                raise ValueError(f"a weight of {weight.dtype}; {name} updates float32 masters (or float64)")
            self.state[weight] = self.new_slots(group, weight)

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
                gradients = [weight.grad.to(weight.dtype) for weight in weights if weight.grad is not None]
                self.update(group, weights, gradients)
        return loss

    def slots(self, weights: Tensors, name: str) -> Tensors:
        """One slot of each weight."""
        return [self.state[weight][name] for weight in weights]


def zeros_like(weight: torch.Tensor) -> torch.Tensor:
    """Zeros of a weight's shape, dtype and memory layout."""
    return torch.zeros_like(weight, memory_format=torch.preserve_format)


def new_count(weight: torch.Tensor) -> torch.Tensor:
    """A count of updates, on the weight's device."""
    return torch.zeros((), dtype=torch.float32, device=weight.device)


def new_counts(weights: Sequence[torch.Tensor]) -> Tensors:
    """`new_count` of each; of weights on one device they are the elements of one tensor, which can be added to."""
    if len({weight.device for weight in weights}) != 1:
        return [new_count(weight) for weight in weights]
    return list(torch.zeros(len(weights), dtype=torch.float32, device=weights[0].device).unbind())


def corrections(counts: Tensors, decay: float, like: torch.Tensor) -> Tensors:
    """1 - decay^t for each count t: in float64, since the first are small differences of numbers close to 1."""
    updates = torch.stack(counts).double()
    return list((1 - decay**updates).to(like, non_blocking=True).unbind())

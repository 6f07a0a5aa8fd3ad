"""The average of the weights that a run keeps: by which formula, when, and swapped with the weights and back.

Formulas are those of `torch.optim.swa_utils`. Running statistics of batch normalization are averaged like the weights
(`AveragedModel(use_buffers=True)`), which needs no further pass over the data and is the same in every layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from onward.optim.schedule_free import AdamWScheduleFree
from onward.parameters import Averaging


class WeightAverage:
    """The average of some tensors of this rank, shaped and sharded as they are.

    Args:
        settings: section `averaging`, with a kind.
        averaged: name -> tensor that training changes in place; the average begins as a copy of it.

    Attributes:
        settings: as above.
        tensors: name -> average.
        count: how often it was averaged; at the first time it is a copy.
    """

    def __init__(self, settings: Averaging, averaged: Mapping[str, torch.Tensor]) -> None:
        self.settings = settings
        self.tensors = {name: tensor.detach().clone() for name, tensor in averaged.items()}
        self.count = 0
        self._averaged = {name: tensor.detach() for name, tensor in averaged.items()}

    def after_update(self, update: int) -> None:
        """Averages where it is due; `update` is the number of weight updates done, skipped ones included."""
        since = update - self.settings.start_update
        if since <= 0 or since % self.settings.every_updates:
            return
        held, now = list(self.tensors.values()), list(self._averaged.values())
        if held and self.count:  # a pipeline stage may have no weights
            share = 1 / (self.count + 1) if self.settings.kind == "swa" else 1 - self.settings.decay
            torch._foreach_lerp_(held, now, share)
        elif held:
            torch._foreach_copy_(held, now)
        self.count += 1

    @property
    def pruned_with_weights(self) -> Mapping[str, torch.Tensor]:
        """Name -> what must be zero, besides the weight, for the average to be."""
        return self.tensors

    def in_place(self) -> contextlib.AbstractContextManager[None]:
        """Swaps average and weights, bit by bit, for as long as this lasts."""
        return swapped(self._averaged, self.tensors)


@contextlib.contextmanager
def swapped(tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Swaps the values of tensors of the same names, bit by bit, for as long as this lasts."""
    _swap(tensors, others)
    try:
        yield
    finally:
        _swap(tensors, others)


def _swap(tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        kept = tensor.clone()  # one at a time: no further copy of all of them
        tensor.copy_(others[name])
        others[name].copy_(kept)


class OptimizerAverage:
    """The average that an optimizer's state implies: the same for a run as a `WeightAverage`, and not kept.

    Args:
        optimizer: whose average it is.
        weights: name -> tensor that the optimizer updates.

    Attributes:
        settings: of an average that is evaluated and exported.
        count: how often it was averaged.
    """

    settings = Averaging()

    def __init__(self, optimizer: AdamWScheduleFree, weights: Mapping[str, torch.Tensor]) -> None:
        self.count = 0
        self._optimizer, self._weights = optimizer, dict(weights)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> average, computed now."""
        return {name: self._optimizer.average_of(weight) for name, weight in self._weights.items()}

    @property
    def pruned_with_weights(self) -> Mapping[str, torch.Tensor]:
        """Name -> what must be zero, besides the weight, for the average to be."""
        return {name: self._optimizer.state[weight]["z"] for name, weight in self._weights.items()}

    def after_update(self, update: int) -> None:
        """Counts; the optimizer averages."""
        self.count += 1

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the average where the weights are for as long as this lasts, and then these bits of the weights back."""
        kept = {name: weight.detach().clone() for name, weight in self._weights.items()}
        try:
            for weight in self._weights.values():
                weight.copy_(self._optimizer.average_of(weight))
            yield
        finally:
            for name, weight in self._weights.items():
                weight.copy_(kept[name])

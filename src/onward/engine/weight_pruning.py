"""Pruning: which elements of the weights are zero, found on full weights, so that every layout prunes the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onward.engine.network.local_weights import LocalWeight
from onward.engine.network.rank_shards import RankShards
from onward.parallel.launch.process import Mesh
from onward.parameters import Pruning


class WeightPruning:
    """The masks of the weights of this rank, sharded as they are.

    Args:
        settings: section `pruning`, with a pattern.
        weights: to be pruned.
        axes: weight -> axis whose neighbors are four of a group.
        mesh: the ranks.

    Attributes:
        masks: weight -> whether each element is pruned.
        sparsity: the share of zeros that was asked for last; 0: nothing was pruned yet.
    """

    def __init__(
        self, settings: Pruning, weights: Mapping[str, LocalWeight], axes: Mapping[str, int], mesh: Mesh
    ) -> None:
        self.settings, self.sparsity = settings, 0.0
        self._weights, self._axes, self._shards = weights, axes, RankShards(mesh, weights.values())
        self.masks = {name: torch.zeros_like(one.parameter, dtype=torch.bool) for name, one in weights.items()}

    @torch.no_grad()
    def after_update(self, update: int, averages: Mapping[str, torch.Tensor]) -> None:
        """Prunes where it is due, and sets what is pruned to zero, in the averages of weights, too."""
        share = self._share_due(update)
        if share is not None and share > self.sparsity:
            for name, weight in self._weights.items():
                self._prune(weight, self.masks[name], share)
            self.sparsity = share
        if not self.sparsity:
            return
        for name, weight in self._weights.items():
            weight.parameter.masked_fill_(self.masks[name], 0.0)
            weight.update_followers()
            if name in averages:
                averages[name].masked_fill_(self.masks[name], 0.0)

    def _share_due(self, update: int) -> float | None:
        """The share of zeros that this update is to end with; None: nothing is pruned after it."""
        asked = self.settings
        start = asked.start_update
        end = start if asked.end_update is None or asked.pattern == "2:4" else asked.end_update
        final = 0.5 if asked.pattern == "2:4" or asked.sparsity is None else asked.sparsity
        if update >= end:
            return final
        if update < start or (update - start) % asked.every_updates:
            return None
        return final + (asked.initial_sparsity - final) * (1 - (update - start) / (end - start)) ** 3

    def _prune(self, weight: LocalWeight, mask: torch.Tensor, share: float) -> None:
        full = self._shards.gather(weight.parameter, weight.parameter.detach()).abs()
        if self.settings.pattern == "2:4":
            pruned = smallest_two_of_four(full, self._axes[weight.name])
        else:
            pruned = smallest(full, share)
        mask.copy_(self._shards.own_shard(weight.parameter, pruned))


def smallest(magnitudes: torch.Tensor, share: float) -> torch.Tensor:
    """Where the smallest elements are, so many that they are this share of all; of equal ones the first."""
    flat = magnitudes.reshape(-1)
    count = round(share * flat.numel())
    if count == 0:
        return torch.zeros_like(magnitudes, dtype=torch.bool)
    bound = flat.kthvalue(count).values
    below, equal = flat < bound, flat == bound
    taken = below | (equal & (equal.cumsum(0) <= count - below.sum()))
    return taken.reshape(magnitudes.shape)


def smallest_two_of_four(magnitudes: torch.Tensor, axis: int) -> torch.Tensor:
    """Where the two smallest of each four neighbors along an axis are; of equal ones the first."""
    moved = magnitudes.movedim(axis, -1)
    order = moved.reshape(-1, 4).argsort(dim=1, stable=True)
    pruned = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order[:, :2], True)
    return pruned.reshape(moved.shape).movedim(-1, axis)

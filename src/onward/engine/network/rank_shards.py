"""How an optimizer computes over full weights on a rank that holds shards of them: sums and gathers over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from onward.engine.network.local_weights import LocalWeight
from onward.optim.weight_shards import Tensors
from onward.parallel.data_parallel import add_up
from onward.parallel.gradients import CountsOnDevice, sum_over_shards
from onward.parallel.launch.process import Mesh


class RankShards:
    """The full weights behind a rank's shards, as `onward.optim.weight_shards.WeightShards` describes them."""

    def __init__(self, mesh: Mesh, weights: Iterable[LocalWeight]) -> None:
        self._mesh = mesh
        self._counts = CountsOnDevice()
        self._weights = {id(weight.parameter): weight for weight in weights}

    def sum_over_shards(self, weights: Tensors, sums: torch.Tensor) -> torch.Tensor:
        """Sums over full weights, from sums over this rank's shards of them, a weight each along the last axis."""
        if self._mesh.data is None and self._mesh.horizontal is None:
            return sums
        held = [self._weights[id(parameter)] for parameter in weights]
        copies = self._counts(sums.device, tuple(self._copies(weight) for weight in held))
        # A weight of one expert is nothing that all replicas know of.
        shared = [index for index, weight in enumerate(held) if weight.experts != "one"]
        return sum_over_shards(self._mesh, sums, copies, None if len(shared) == len(held) else shared)

    def _copies(self, weight: LocalWeight) -> int:
        """How many of the ranks whose sums are added up hold the same elements."""
        topology, experts = self._mesh.topology, self._mesh.experts
        of_horizontal = 1 if weight.is_sharded_horizontally else topology.horizontal_size
        if weight.experts == "one":
            return of_horizontal
        sharded = experts.size() if weight.experts and experts is not None else 1
        return of_horizontal * topology.worker_size // (topology.zero_size if weight.is_sharded_by_zero else sharded)

    def counted(self, weights: Tensors, tensors: Tensors) -> Tensors:
        """Of tensors that are sharded like weights, the elements that only this rank adds to sums over full weights."""
        return [self._weights[id(weight)].counted(one) for weight, one in zip(weights, tensors, strict=True)]

    def full_shape(self, weight: torch.Tensor) -> tuple[int, ...]:
        """The shape of the full weight."""
        return self._weights[id(weight)].full_shape

    def gather(self, weight: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """The full tensor on every rank; the ranks add what each of them holds to zeros, which is exact."""
        held = self._weights[id(weight)]
        if not self._is_sharded(held):
            return shard
        full = torch.zeros(held.full_shape, dtype=shard.dtype, device=self._mesh.device)
        for part in (one for one in held.shards if one.is_counted):
            full[part.slices] = shard[part.local_slices].to(full.device)
        add_up([full], self._mesh.zero if held.is_sharded_by_zero else None)
        add_up([full], self._mesh.experts if held.experts == "stack" else None)
        add_up([full], self._mesh.horizontal if held.is_sharded_horizontally else None)
        return full

    def own_shard(self, weight: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a full tensor."""
        held = self._weights[id(weight)]
        if not self._is_sharded(held):
            return full
        shard = torch.empty_like(weight, dtype=full.dtype)
        for part in held.shards:
            shard[part.local_slices] = full[part.slices].to(shard.device)
        return shard

    def _is_sharded(self, held: LocalWeight) -> bool:
        return held.is_sharded_by_zero or held.is_sharded_horizontally or held.experts == "stack"

    def holders(self, weight: torch.Tensor) -> tuple[int, int]:
        """Those of the replicas where ZeRO shards the weight, else those of tensor parallelism."""
        group = self._group(weight)
        return (0, 1) if group is None else (group.rank(), group.size())

    def from_holder(self, weight: torch.Tensor, number: int, full: torch.Tensor) -> torch.Tensor:
        """The ranks add what it has to zeros, which is exact."""
        group = self._group(weight)
        if group is None:
            return full
        found = full if group.rank() == number else torch.zeros_like(full)
        add_up([found], group)
        return found

    def _group(self, weight: torch.Tensor) -> Any:
        held = self._weights[id(weight)]
        if held.is_sharded_by_zero:
            return self._mesh.zero
        if held.experts == "stack":
            return self._mesh.experts
        return self._mesh.horizontal if held.is_sharded_horizontally else None

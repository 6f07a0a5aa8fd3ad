"""What an optimizer knows of the full weights where a rank holds shards of them, and how it computes over all."""

from __future__ import annotations

from typing import Protocol

import torch

Tensors = list[torch.Tensor]


class WeightShards(Protocol):
    """The full weights behind the tensors that a rank's optimizer updates; all ranks that hold shards call alike."""

    def sum_over_shards(self, weights: Tensors, sums: torch.Tensor) -> torch.Tensor:
        """Sums over full weights, from sums over this rank's shards of them, a weight each along the last axis."""
        ...

    def counted(self, weights: Tensors, tensors: Tensors) -> Tensors:
        """Of tensors that are sharded like weights, the elements that only this rank adds to sums over full weights."""
        ...

    def full_shape(self, weight: torch.Tensor) -> tuple[int, ...]:
        """The shape of the full weight."""
        ...

    def gather(self, weight: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """The full tensor, from tensors that are sharded like a weight; the tensor itself where it is full."""
        ...

    def own_shard(self, weight: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a full tensor."""
        ...

    def holders(self, weight: torch.Tensor) -> tuple[int, int]:
        """This rank's number among those that gather a weight together, and how many these are."""
        ...

    def from_holder(self, weight: torch.Tensor, number: int, full: torch.Tensor) -> torch.Tensor:
        """The full tensor that one of the ranks that gather a weight has; the others give one of its shape."""
        ...


class Unsharded:
    """Of a rank that holds full weights."""

    def sum_over_shards(self, weights: Tensors, sums: torch.Tensor) -> torch.Tensor:
        """The sums themselves."""
        return sums

    def counted(self, weights: Tensors, tensors: Tensors) -> Tensors:
        """The tensors themselves."""
        return tensors

    def full_shape(self, weight: torch.Tensor) -> tuple[int, ...]:
        """Its shape."""
        return tuple(weight.shape)

    def gather(self, weight: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return shard

    def own_shard(self, weight: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return full

    def holders(self, weight: torch.Tensor) -> tuple[int, int]:
        """It is alone."""
        return 0, 1

    def from_holder(self, weight: torch.Tensor, number: int, full: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return full


UNSHARDED = Unsharded()

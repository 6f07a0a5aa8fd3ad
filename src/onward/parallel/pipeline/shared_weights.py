"""Weights that are on several pipeline stages (tied embeddings): their gradients are summed, and copies stay equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from onward.parallel.data_parallel import local_part


def sum_shared_gradients(
    shared: Mapping[str, tuple[int, ...]],
    weights: Mapping[int, Mapping[str, torch.Tensor]],
    ranks: Sequence[int],
    group: dist.ProcessGroup,
) -> None:
    """Adds up gradients of weights that several stages hold, each with those of the same weight elsewhere.

    Sums are taken in the order of ranks everywhere, so that copies of a weight stay equal. A sharded weight
    (`fully_shard`) is summed shard by shard.

    Args:
        shared: weight -> stages that hold it.
        weights: stage of this rank -> weights by name.
        ranks: rank of the group for each stage.
        group: of the pipeline.
    """
    rank = group.rank()
    parts: dict[str, dict[int, torch.Tensor]] = {}
    operations = []
    for name, stages in shared.items():
        mine = _distinct(weights[stage][name] for stage in stages if ranks[stage] == rank)
        if not mine:
            continue
        own = _gradient(mine[0]).clone()
        for other in mine[1:]:
            own += _gradient(other)
        parts[name] = {rank: own}
        for peer in sorted({ranks[stage] for stage in stages} - {rank}):
            parts[name][peer] = torch.empty_like(own)
            operations.append(dist.P2POp(dist.isend, own, group=group, group_peer=peer))
            operations.append(dist.P2POp(dist.irecv, parts[name][peer], group=group, group_peer=peer))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    for name, by_rank in parts.items():
        first, *others = (by_rank[peer] for peer in sorted(by_rank))
        total = first.clone()
        for part in others:
            total += part
        for stage in shared[name]:
            if ranks[stage] == rank:
                _gradient(weights[stage][name]).copy_(total)


def _distinct(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Two stages of one rank may hold the very same tensor."""
    return list({id(weight): weight for weight in weights}.values())


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a weight's gradient, made if there is none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return local_part(weight.grad)

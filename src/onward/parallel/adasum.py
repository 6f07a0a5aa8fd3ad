"""Adasum: combining the gradients of replicas so that parallel ones average and orthogonal ones add up.

Maleki et al. 2021, "Scaling Distributed Training with Adaptive Summation" (arXiv 2006.02924): for two gradients a and b
of one tensor, `Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b`; of more, of pairs of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def adasum(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replaces each gradient by the Adasum over a group, in place, tensor by tensor; the same bits on every rank.

    Ranks combine in pairs of neighbors, then neighboring pairs, and so on; where the number of ranks is no power of
    two, a group that has no neighbor waits for the next round. Every round sends all gradients once.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    lengths = [gradient.numel() for gradient in gradients]
    width = 1
    while width < size:
        first = rank // (2 * width) * (2 * width)
        if first + width < size:
            flat = _combine_with(flat, lengths, first, width, size, group)
        width *= 2
    for gradient, part in zip(gradients, torch.split(flat, lengths), strict=True):
        gradient.copy_(part.view_as(gradient))


def _combine_with(
    flat: torch.Tensor, lengths: list[int], first: int, width: int, size: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Communicates with the neighboring group of ranks and combines; `first` is the first rank of the two groups."""
    rank = dist.get_rank(group)
    other = torch.empty_like(flat)
    second = first + width
    partners = min(width, size - second)
    if rank < second:
        source = second + (rank - first) % partners
        sends = [source] if rank - first < partners else []
    else:
        # The upper group may be smaller; then each of its ranks serves several of the lower one.
        source = first + (rank - second)
        sends = [r for r in range(first, second) if (r - first) % partners == rank - second]
    operations = [dist.P2POp(dist.isend, flat, group=group, group_peer=peer) for peer in sends]
    operations.append(dist.P2POp(dist.irecv, other, group=group, group_peer=source))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    lower, upper = (flat, other) if rank < second else (other, flat)
    pairs = zip(torch.split(lower, lengths), torch.split(upper, lengths), strict=True)
    return torch.cat([_pair(a, b) for a, b in pairs])


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The formula, in float64 sums; where a gradient is zero, the other one is the result."""
    wide_a, wide_b = a.double(), b.double()
    product, square_a, square_b = wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b
    one = torch.ones_like(product)
    factor_a = torch.where(square_a > 0, one - product / (2 * square_a), one)
    factor_b = torch.where(square_b > 0, one - product / (2 * square_b), one)
    return (factor_a * wide_a + factor_b * wide_b).to(a.dtype)

"""What is left to do with gradients once every backward pass of an update is over, and numbers all ranks must agree on.

Averaging over replicas happens during the backward pass (`data_parallel`); here is what only some weights need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist

from onward.parallel.adasum import adasum
from onward.parallel.data_parallel import add_up, average
from onward.parallel.launch.process import Mesh
from onward.plan.shards import TensorShard


def finish_gradients(
    mesh: Mesh,
    gradients: Mapping[str, torch.Tensor],
    *,
    partial: Sequence[str] = (),
    replicated: Mapping[str, Sequence[TensorShard]] = MappingProxyType({}),
    not_reduced: Sequence[str] = (),
    experts: Sequence[str] = (),
    enable_adasum: bool = False,
) -> None:
    """Completes every gradient, in place.

    Args:
        mesh: the ranks.
        gradients: weight -> what the backward passes of this rank left of its gradient.
        partial: weights that are unsharded on every tensor-parallel rank but whose gradients are sums over these ranks.
        replicated: weight -> its shards that several tensor-parallel ranks hold, each with a part of the gradient.
        not_reduced: weights whose gradients the engine of data parallelism left to us.
        experts: weights of experts, whose gradients are sums over the replicas that share the experts.
        enable_adasum: combine the replicas' gradients by Adasum; none was averaged before.
    """
    add_up([gradients[name] for name in partial if name in gradients], mesh.horizontal)
    add_up_copies(mesh.horizontal, gradients, replicated)
    if mesh.data is None:
        return
    if enable_adasum:
        adasum(list(gradients.values()), mesh.data)
    else:
        average([gradients[name] for name in not_reduced if name in gradients], mesh.data)
    of_experts = [gradients[name] for name in experts if name in gradients]
    if of_experts and mesh.experts is not None:
        torch._foreach_div_(of_experts, float(mesh.experts.size()))
        average(of_experts, mesh.expert_copies)


def add_up_copies(
    group: dist.ProcessGroup | None,
    gradients: Mapping[str, torch.Tensor],
    replicated: Mapping[str, Sequence[TensorShard]],
) -> None:
    """Sums the gradients of shards over the tensor-parallel ranks that hold the same ones, in place.

    Each rank puts its own into the place of these ranks, among zeros.
    """
    if group is None:
        return
    shards = [
        (gradients[name][one.local_slices], one.replica[1]) for name, found in replicated.items() for one in found
    ]
    places = [gradient.new_zeros(group.size() // copies, *gradient.shape) for gradient, copies in shards]
    for place, (gradient, copies) in zip(places, shards, strict=True):
        place[group.rank() // copies] = gradient
    add_up(places, group)
    for place, (gradient, copies) in zip(places, shards, strict=True):
        gradient.copy_(place[group.rank() // copies])


def total_norm(mesh: Mesh, gradients: Sequence[torch.Tensor], copies: torch.Tensor) -> torch.Tensor:
    """The L2 norm of all gradients of all ranks of a worker together, a scalar, the same on each of them.

    Args:
        mesh: the ranks.
        gradients: of this rank; may be empty.
        copies: for each of them, how many ranks of the worker hold the same elements; on the mesh's device.
    """
    return checked_norm(mesh, gradients, copies, ())[0]


def checked_norm(
    mesh: Mesh, gradients: Sequence[torch.Tensor], copies: torch.Tensor, checked: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`total_norm`, and the same again, but infinite where any of `checked` is not finite on any rank.

    Args:
        mesh, gradients, copies: as of `total_norm`.
        checked: other float tensors of this rank; may be empty.
    """
    numbers = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    if gradients:
        norms = torch.stack([norm.to(mesh.device) for norm in torch._foreach_norm(list(gradients))]).double()
        numbers[0] = (norms.square() / copies).sum()
    numbers[1] = count_not_finite(mesh.device, checked)
    if mesh.ranks_of_worker > 1:
        dist.all_reduce(numbers, group=mesh.worker)
    norm = numbers[0].sqrt().float()
    return norm, torch.where(numbers[1] > 0, torch.inf, norm)


def count_not_finite(device: torch.device, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """How many tensors hold a value that is not finite; on the device, without waiting for it."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    largest = torch._foreach_norm(list(tensors), math.inf)  # NaN where there is one
    return torch.stack([one.to(device) for one in largest]).isfinite().logical_not().sum().double()


class CountsOnDevice:
    """Counts as float64 tensors on a device; each is copied there once, since copying waits for the device."""

    def __init__(self) -> None:
        self._found: dict[tuple[torch.device, tuple[int, ...]], torch.Tensor] = {}

    def __call__(self, device: torch.device, counts: tuple[int, ...]) -> torch.Tensor:
        """The counts as a tensor."""
        key = device, counts
        if key not in self._found:
            self._found[key] = torch.tensor(counts, dtype=torch.float64, device=device)
        return self._found[key]


def sum_over_shards(
    mesh: Mesh, squares: torch.Tensor, copies: torch.Tensor, over_replicas: Sequence[int] | None = None
) -> torch.Tensor:
    """Sums over the elements of full weights, from the sums over this rank's shards of them.

    Args:
        mesh: the ranks.
        squares: one number for each weight, along the last axis.
        copies: for each weight, how many of the ranks that are added up hold the same elements.
        over_replicas: the weights that replicas hold, too; None: all of them.
    """
    # Groups of a mesh of GPUs carry tensors of GPUs only; what waits in host memory (ZeRO's offloading) goes there.
    total = (squares.double() / copies).to(mesh.device)
    if mesh.data is not None and over_replicas is None:
        dist.all_reduce(total, group=mesh.data)
    elif mesh.data is not None and over_replicas:
        shared = total[..., list(over_replicas)]
        dist.all_reduce(shared, group=mesh.data)
        total[..., list(over_replicas)] = shared
    if mesh.horizontal is not None:
        dist.all_reduce(total, group=mesh.horizontal)
    return total.to(squares)


def sum_over_group(group: dist.ProcessGroup | None, numbers: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over a group, the same on each rank; a new tensor."""
    total = numbers.clone()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total

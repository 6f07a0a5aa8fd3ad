"""What a rank holds of every weight: the plain tensor that its optimizer updates, and where it is in the full tensor.

Engines may keep a weight gathered, sharded or as a view into a buffer; the optimizer, the norms and the checkpoints
see plain tensors and shards only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from onward.engine.network.network import Network
from onward.parallel.data_parallel import local_part, rows_of
from onward.parallel.launch.process import Mesh
from onward.parallel.sharded_tensors import ShardedTensor
from onward.plan.experts import ALL_EVERYWHERE, ExpertPlan
from onward.plan.shards import Sharding, TensorShard, cut, range_of_rank


@dataclass(frozen=True, kw_only=True)
class LocalWeight:
    """A rank's shards of a weight.

    Attributes:
        name: of the initializer.
        parameter: what the optimizer updates, sharing memory with the network's own weight.
        source: the network's own: where gradients arrive.
        full_shape: of the full weight.
        shards: which elements of it the rank holds.
        copies: how many ranks of a worker hold the same elements.
        is_written: whether this is the one of them that writes these elements into checkpoints.
        is_first: whether this rank is the first of the worker's that hold any of the weight.
        is_of_first_worker: whether it is of the first worker of local SGD; without it, always.
        is_sharded_horizontally: whether the ranks of the tensor-parallel group hold different elements.
        is_sharded_by_zero: whether the replicas do.
        experts: `stack` where replicas hold different experts of it, `one` where some hold all of it and others
            nothing; "": it belongs to no expert, or all replicas hold it.
        followers: further copies on this rank, in other stages.
    """

    name: str
    parameter: nn.Parameter
    source: nn.Parameter
    full_shape: tuple[int, ...]
    shards: tuple[TensorShard, ...]
    copies: int
    is_written: bool
    is_first: bool
    is_of_first_worker: bool
    is_sharded_horizontally: bool
    is_sharded_by_zero: bool
    experts: Literal["", "stack", "one"] = ""
    followers: list[nn.Parameter] = field(default_factory=list)

    @property
    def sharded(self) -> ShardedTensor:
        """As checkpoints want it."""
        return self.sharded_like(self.parameter.detach())

    def sharded_like(self, tensor: torch.Tensor) -> ShardedTensor:
        """A tensor that is sharded like the weight: its gradient, a moment. A scalar is the same everywhere."""
        if tensor.dim() == 0 and self.full_shape:
            return ShardedTensor.full(tensor, self.is_first)
        return ShardedTensor(tensor, self.full_shape, self.shards, self.is_written)

    def shared_like(self, tensor: torch.Tensor) -> ShardedTensor:
        """The same of a tensor that all workers of local SGD have alike, or of which the first worker's counts."""
        return ShardedTensor(tensor, self.full_shape, self.shards, self.is_written and self.is_of_first_worker)

    def take_gradient(self) -> torch.Tensor | None:
        """Hands the gradient that arrived at the network's weight to the optimizer's, and returns it."""
        arrived = self.source.grad
        if self.parameter is not self.source:
            arrived = self.parameter.grad = None if arrived is None else local_part(arrived)
        return arrived

    @property
    def replicated_shards(self) -> tuple[TensorShard, ...]:
        """The shards that several tensor-parallel ranks hold."""
        return tuple(shard for shard in self.shards if shard.replica[1] > 1)

    def counted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor that is sharded like the weight, what no tensor-parallel rank before this one holds, too."""
        if all(shard.is_counted for shard in self.shards):
            return tensor
        own = [tensor[shard.local_slices].reshape(-1) for shard in self.shards if shard.is_counted]
        return torch.cat(own) if own else tensor.new_zeros(0)

    def drop_gradient(self) -> None:
        """Forgets gradients, the followers' too."""
        self.parameter.grad = None
        if self.source is not self.parameter:
            self.source.grad = None
        for follower in self.followers:
            follower.grad = None

    def update_followers(self) -> None:
        """Gives the further copies on this rank the values of this one."""
        for follower in self.followers:
            local_part(follower.detach()).copy_(self.parameter.detach())


def local_weights(
    networks: Sequence[Network],
    mesh: Mesh,
    horizontal: Mapping[str, Sharding],
    full_shapes: Mapping[str, Sequence[int]],
    stages: Mapping[str, Sequence[int]],
    experts: ExpertPlan = ALL_EVERYWHERE,
) -> dict[str, LocalWeight]:
    """The weights of this rank by name.

    Args:
        networks: of the stages of this rank, after they were replicated or sharded.
        mesh: the ranks.
        horizontal: how weights are sharded by tensor parallelism; those not listed are not.
        full_shapes: of the weights that are sharded; others have the shape of the network's own.
        stages: ranks of the pipeline that hold a weight, where it is more than one.
        experts: which replicas hold which.
    """
    found: dict[str, LocalWeight] = {}
    for network in networks:
        for name, source in network.net.weights.items():
            if name in found:
                found[name].followers.append(source)
            else:
                shape = tuple(full_shapes.get(name, source.shape))
                held = stages.get(name, ())
                found[name] = _local_weight(name, source, mesh, horizontal.get(name), shape, held, experts)
    return found


def _local_weight(
    name: str,
    source: nn.Parameter,
    mesh: Mesh,
    sharding: Sharding | None,
    full_shape: tuple[int, ...],
    stages: Sequence[int],
    experts: ExpertPlan,
) -> LocalWeight:
    topology = mesh.topology
    place = topology.place_in_worker(mesh.place)
    if sharding is None:
        zeros = (0,) * len(full_shape)
        shards: tuple[TensorShard, ...] = (TensorShard(zeros, full_shape, zeros),)
    else:
        shards = sharding.shards(full_shape, place.horizontal, topology.horizontal_size)
    is_stack, is_one = name in experts.stacks, name in experts.owners
    if is_stack:
        shards = cut(shards, *range_of_rank(full_shape[0], experts.rank(place.data), experts.size))
    rows = rows_of(source, mesh)
    if rows is not None:
        shards = cut(shards, *rows)
    local = local_part(source)
    parameter = source if local is source else nn.Parameter(local)
    copies = len(stages) or 1
    is_written = is_first = not stages or place.pipeline == min(stages)
    is_first = is_first and place.horizontal == 0 and place.data == experts.owners.get(name, 0)
    if sharding is None:
        copies *= topology.horizontal_size
        is_written = is_written and place.horizontal == 0
    # Replicas with different parts of it.
    writers = topology.zero_size if rows is not None else experts.size if is_stack or is_one else 1
    copies *= topology.worker_size // writers
    is_written = is_written and place.data < writers
    return LocalWeight(
        name=name,
        parameter=parameter,
        source=source,
        full_shape=full_shape,
        shards=shards,
        copies=copies,
        is_written=is_written,
        is_first=is_first,
        is_of_first_worker=topology.worker(mesh.place) == 0,
        is_sharded_horizontally=sharding is not None,
        is_sharded_by_zero=rows is not None,
        experts="stack" if is_stack else "one" if is_one else "",
    )

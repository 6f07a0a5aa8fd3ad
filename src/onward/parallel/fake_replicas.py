"""A group of processes of which only this one exists: engines shard and communicate as ever, and nothing is sent.

For forecasts on tensors without memory, whose numbers do not matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from onward.parallel.launch.process import ZERO_DIMENSIONS, Mesh
from onward.plan.topology import Place, Topology


@contextlib.contextmanager
def fake_replicas(topology: Topology, place: Place) -> Iterator[Mesh]:
    """The mesh of a rank among replicas that are not there; its other dimensions have no groups.

    Inside of a running group, which must be of this topology, all of its ranks have to call this together, and each
    stands in for the replica that it is.
    """
    rank, device = topology.rank(place), torch.device("cpu")
    if topology.worker_size == 1:
        yield Mesh(topology=topology, rank=rank, device=device)
        return
    with _own_shards(), _group(topology, place, rank, device) as mesh:
        yield mesh


@contextlib.contextmanager
def _own_shards() -> Iterator[None]:
    """Lets `fully_shard` make those shards that it reads: its own and the first, of thousands a weight."""
    module: Any = fsdp._fully_shard._fsdp_param
    original = module._chunk_with_empty
    module._chunk_with_empty = _Shards
    try:
        yield
    finally:
        module._chunk_with_empty = original


class _Shards:
    """`torch.chunk`, made one by one; those after the last row are empty."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._axis = tensor, dim
        self._rows = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        start, size = index * self._rows, self._tensor.size(self._axis)
        if self._rows and start >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._axis, start, min(self._rows, size - start))


@contextlib.contextmanager
def _group(topology: Topology, place: Place, rank: int, device: torch.device) -> Iterator[Mesh]:
    if dist.is_initialized():
        own = topology.place(dist.get_rank())
        first = topology.worker(own) * topology.worker_size
        of_worker = range(first, first + topology.worker_size)
        mates = [topology.rank(dataclasses.replace(own, data=index)) for index in of_worker]
        group = dist.new_group(mates, backend="fake", use_local_synchronization=True)
        mesh, zero = (
            DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data",)),
            _zero_mesh(topology, own.data - first, mates),
        )
        try:
            rank = topology.rank(dataclasses.replace(place, data=own.data))
            yield Mesh(topology=topology, rank=rank, device=device, data=group, device_mesh=mesh, zero_mesh=zero)
        finally:
            for one in (group, *(() if zero is None else zero.get_all_groups())):
                dist.destroy_process_group(one)
        return
    in_worker, size = topology.place_in_worker(place).data, topology.worker_size
    dist.init_process_group("fake", rank=in_worker, world_size=size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
        zero, data = _zero_mesh(topology, in_worker, range(size)), mesh.get_group("data")
        yield Mesh(topology=topology, rank=rank, device=device, data=data, device_mesh=mesh, zero_mesh=zero)
    finally:
        dist.destroy_process_group()


def _zero_mesh(topology: Topology, own: int, mates: Sequence[int]) -> DeviceMesh | None:
    """The replicas as groups among which ZeRO shards; `own` of them exists."""
    size = topology.zero_size
    if size == topology.worker_size:
        return None
    first = own - own % size
    groups = [
        dist.new_group(list(ranks), backend="fake", use_local_synchronization=True)
        for ranks in (mates[own % size :: size], mates[first : first + size])
    ]
    table = [list(mates[start : start + size]) for start in range(0, len(mates), size)]
    return DeviceMesh.from_group(groups, "cpu", table, mesh_dim_names=ZERO_DIMENSIONS)


SUMS = "sums over the replicas"
COLLECTIVES = {
    "c10d._allgather_base_": "weights gathered (ZeRO)",
    "c10d._reduce_scatter_base_": "gradients, reduce-scattered",
    "c10d.alltoall_base_": "gradients, reduce-scattered",
    "c10d.allreduce_": SUMS,
    "onward.expert_exchange": "expert all-to-all",
    "onward.horizontal_all_reduce": "tensor-parallel all-reduce",
    "onward.horizontal_all_gather": "tensor-parallel all-gather",
    "onward.horizontal_reduce_scatter": "tensor-parallel reduce-scatter",
    "onward.context_all_reduce": "context all-reduce",
    "onward.context_all_gather": "context all-gather",
    "onward.context_reduce_scatter": "context reduce-scatter",
}
"""Collective operators of torch -> what they do, in words."""

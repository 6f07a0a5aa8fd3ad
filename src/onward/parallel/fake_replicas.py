"""A group of processes of which only this one exists: engines shard and exchange as ever, and nothing travels.

For forecasts on tensors without memory, whose numbers do not matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from onward.parallel.launch.process import Mesh
from onward.plan.topology import Place, Topology


@contextlib.contextmanager
def fake_replicas(topology: Topology, place: Place) -> Iterator[Mesh]:
    """The mesh of a rank among replicas that are not there; its other dimensions have no groups.

    Inside of a running group, which must be of this topology, all of its ranks have to call this together, and each
    stands in for the replica that it is.
    """
    rank, device = topology.rank(place), torch.device("cpu")
    if topology.data_size == 1:
        yield Mesh(topology=topology, rank=rank, device=device)
        return
    if dist.is_initialized():
        own = topology.place(dist.get_rank())
        mates = [topology.rank(dataclasses.replace(own, data=index)) for index in range(topology.data_size)]
        group = dist.new_group(mates, backend="fake", use_local_synchronization=True)
        try:
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data",))
            rank = topology.rank(dataclasses.replace(place, data=own.data))
            yield Mesh(topology=topology, rank=rank, device=device, data=group, device_mesh=mesh)
        finally:
            dist.destroy_process_group(group)
        return
    dist.init_process_group("fake", rank=place.data, world_size=topology.data_size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (topology.data_size,), mesh_dim_names=("data",))
        yield Mesh(topology=topology, rank=rank, device=device, data=mesh.get_group("data"), device_mesh=mesh)
    finally:
        dist.destroy_process_group()


COLLECTIVES = {
    "c10d._allgather_base_": "weights gathered (ZeRO)",
    "c10d._reduce_scatter_base_": "gradients, reduce-scattered",
    "c10d.allreduce_": "sums over the replicas",
    "onward.horizontal_all_reduce": "horizontal all-reduce",
    "onward.horizontal_all_gather": "horizontal all-gather",
    "onward.horizontal_reduce_scatter": "horizontal reduce-scatter",
}
"""Operators of torch that exchange -> what they exchange, in words."""

"""A group of which only this process exists: engines exchange as ever, and nothing travels."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from onward.parallel.fake_replicas import _Shards, fake_replicas
from onward.plan.topology import Place, Topology


def test_an_exchange_returns_at_once() -> None:
    with fake_replicas(Topology(data_size=4, horizontal_size=1, pipeline_size=1), Place(2, 0, 0)) as mesh:
        assert (mesh.rank, dist.get_rank(mesh.data), dist.get_world_size(mesh.data)) == (2, 2, 4)
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=mesh.data)
        dist.all_gather([torch.empty(3) for _ in range(4)], tensor, group=mesh.data)
        assert mesh.device_mesh is not None
        assert mesh.device_mesh.size() == 4
    assert not dist.is_initialized()


def test_a_replica_alone_has_no_group() -> None:
    with fake_replicas(Topology(data_size=1, horizontal_size=2, pipeline_size=1), Place(0, 1, 0)) as mesh:
        assert (mesh.rank, mesh.data, mesh.device_mesh) == (1, None, None)
        assert not dist.is_initialized()


def test_the_group_goes_though_something_fails_inside() -> None:
    try:
        with fake_replicas(Topology(data_size=2, horizontal_size=1, pipeline_size=1), Place(0, 0, 0)):
            raise KeyError
    except KeyError:
        pass
    assert not dist.is_initialized()


def test_shards_are_those_that_torch_makes() -> None:
    """Also where ranks are left without rows, or the tensor has none."""
    for ranks, rows in itertools.product((1, 2, 3, 4, 7, 16), (0, 1, 3, 5, 9, 16)):
        tensor = torch.arange(rows * 3.0).view(rows, 3)
        found = _Shards(tensor, ranks, 0)
        for index, expected in enumerate(_chunk_with_empty(tensor, ranks, 0)):
            assert torch.equal(found[index], expected)

"""What every rank of a mesh holds of a weight: all ranks together the whole, each element written once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from onward.engine.network.local_weights import LocalWeight, local_weights
from onward.parallel.fake_replicas import fake_replicas
from onward.parallel.launch.process import Mesh
from onward.plan.shards import Sharding
from onward.plan.topology import Topology

TOPOLOGY = Topology(data_size=3, horizontal_size=2, pipeline_size=2)
IN_GROUPS = Topology(data_size=6, horizontal_size=2, pipeline_size=2, zero_group_size=3)
SHARD = Sharding(1, (4, 2))
"""Columns of the full weight, in two blocks that are sharded one by one."""


@contextmanager
def rank_of(
    rank: int, rows: int | None, columns: int, topology: Topology = TOPOLOGY
) -> Iterator[tuple[Mesh, nn.Parameter]]:
    """A rank alone and its weight [rows, columns]; with rows given, ZeRO's part of it, as `fully_shard` cuts it."""
    with fake_replicas(topology, topology.place(rank)) as mesh:
        if rows is None:
            yield mesh, nn.Parameter(torch.zeros(5, columns))
            return
        replicas = mesh.zero_mesh or mesh.device_mesh
        assert replicas is not None
        chunk = -(-rows // 3)
        mine = max(0, min(chunk, rows - chunk * (mesh.place.data % 3)))
        placements = [Replicate(), Shard(0)][-replicas.ndim :]
        part = DTensor.from_local(
            torch.zeros(mine, columns), replicas, placements, shape=torch.Size([rows, columns]),
            stride=(columns, 1), run_check=False,
        )  # fmt: skip
        yield mesh, nn.Parameter(part)


def held(
    rank: int, rows: int | None, is_cut: bool, stages: tuple[int, ...], topology: Topology = TOPOLOGY
) -> LocalWeight | None:
    """What a rank holds of one weight; None where its stage has none."""
    place = topology.place(rank)
    if place.pipeline not in (stages or (0,)):
        return None
    with rank_of(rank, rows, 3 if is_cut else 6, topology) as (mesh, weight):
        network = SimpleNamespace(net=SimpleNamespace(weights={"w": weight}))
        whole = {"w": (5 if rows is None else rows, 6)}
        horizontal = {"w": SHARD} if is_cut else {}
        found = local_weights([network], mesh, horizontal, whole, {"w": stages} if stages else {})  # type: ignore[list-item]
        return found["w"]


@pytest.mark.parametrize("rows", [None, 5, 4, 1])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("stages", [(), (0, 1)])
@pytest.mark.parametrize("topology", [TOPOLOGY, IN_GROUPS])
def test_ranks_hold_the_whole_and_write_each_element_once(
    rows: int | None, is_cut: bool, stages: tuple[int, ...], topology: Topology
) -> None:
    shape = (5 if rows is None else rows, 6)
    times, written = np.zeros(shape, int), np.zeros(shape, int)
    copies, firsts = set(), 0
    for rank in range(topology.world_size):
        weight = held(rank, rows, is_cut, stages, topology)
        if weight is None:
            continue
        assert weight.full_shape == shape
        assert weight.sharded.num_elements == weight.parameter.numel()
        assert (weight.is_sharded_horizontally, weight.is_sharded_by_zero) == (is_cut, rows is not None)
        copies.add(weight.copies)
        firsts += weight.is_first
        for shard in weight.shards:
            times[shard.slices] += 1
            written[shard.slices] += weight.is_written
    assert len(copies) == 1
    assert (times == copies.pop()).all()
    assert (written == 1).all()
    assert firsts == 1


def test_a_number_that_belongs_to_a_weight_is_written_by_one_rank() -> None:
    step = torch.tensor(3.0)
    tensors = [held(rank, 4, True, ()) for rank in range(TOPOLOGY.world_size)]
    found = [weight.sharded_like(step) for weight in tensors if weight is not None]
    assert [sharded.full_shape for sharded in found] == [()] * 6
    assert [sharded.is_written for sharded in found].count(True) == 1


def test_gradients_go_from_the_networks_weight_to_the_optimizers() -> None:
    with rank_of(1, 4, 6) as (mesh, weight):
        networks = [SimpleNamespace(net=SimpleNamespace(weights={"w": one})) for one in (weight, nn.Parameter(weight))]
        found = local_weights(networks, mesh, {}, {"w": (4, 6)}, {})["w"]  # type: ignore[arg-type]
        assert found.parameter is not found.source
        assert found.take_gradient() is None
        weight.grad = weight.detach().clone()
        weight.grad._local_tensor.fill_(2.0)
        taken = found.take_gradient()
        assert taken is not None
        assert found.parameter.grad is taken
        assert not isinstance(taken, DTensor)
        assert taken.shape == found.parameter.shape == (2, 6)
        assert bool((taken == 2.0).all())
        found.drop_gradient()
        assert weight.grad is None
        assert found.parameter.grad is None
        with torch.no_grad():
            found.parameter.fill_(7.0)
        assert bool((weight._local_tensor == 7.0).all())


def test_further_copies_on_a_rank_follow() -> None:
    first, second = nn.Parameter(torch.zeros(5, 6)), nn.Parameter(torch.ones(5, 6))
    networks = [SimpleNamespace(net=SimpleNamespace(weights={"w": one})) for one in (first, second)]
    with fake_replicas(Topology(), Topology().place(0)) as mesh:
        weight = local_weights(networks, mesh, {}, {}, {})["w"]  # type: ignore[arg-type]
    assert weight.parameter is weight.source is first
    assert len(weight.followers) == 1
    with torch.no_grad():
        first.fill_(3.0)
    weight.update_followers()
    assert torch.equal(second, first)
    second.grad = torch.ones(5, 6)
    weight.drop_gradient()
    assert second.grad is None

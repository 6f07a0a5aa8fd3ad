"""Gradients made whole, norms over parts and copies, and full tensors gathered, on four real ranks."""

from __future__ import annotations

import torch

from onward.parallel.gathering import gather_full
from onward.parallel.gradients import finish_gradients, sum_over_group, sum_over_shards, total_norm
from onward.parallel.launch.process import Mesh, in_world_of_one, start
from onward.parallel.sharded_tensors import ShardedTensor
from onward.parameters.distributed import Distributed
from onward.plan.shards import Sharding, TensorShard
from tests.ranks import run_on_ranks

WHOLE = torch.arange(24, dtype=torch.float32).reshape(6, 4) + 1


def mesh_of_four() -> Mesh:
    return start(Distributed(data_parallel_size=2, horizontal_parallel_size=2), "cpu")


def finish() -> dict[str, list[float]]:
    mesh = mesh_of_four()
    place = mesh.place
    gradients = {
        "partial": torch.tensor([10.0 * place.horizontal + place.data]),
        "left": torch.tensor([float(place.data)]),
        "done": torch.tensor([7.0 + mesh.rank]),
    }
    finish_gradients(mesh, gradients, partial=["partial", "not here"], not_reduced=["left"])
    return {name: gradient.tolist() for name, gradient in gradients.items()}


def test_partial_gradients_are_summed_and_unreduced_ones_averaged() -> None:
    for rank, found in enumerate(run_on_ranks(4, finish)):
        data = rank // 2
        assert found == {"partial": [10.0 + 2 * data], "left": [0.5], "done": [7.0 + rank]}


def norms() -> tuple[float, list[float], list[float]]:
    """The whole is cut by columns over the tensor-parallel ranks; a second weight is the same on all four."""
    mesh = mesh_of_four()
    part = WHOLE.chunk(2, 1)[mesh.place.horizontal]
    same = torch.full((3,), 2.0)
    norm = total_norm(mesh, [part, same], torch.tensor([2, 4]))
    squares = torch.stack([part.square().sum(), same.square().sum()])
    sums = sum_over_shards(mesh, squares, torch.tensor([2, 4]))
    return float(norm), sums.tolist(), sum_over_group(mesh.data, torch.tensor([float(mesh.place.data + 1)])).tolist()


def test_norms_are_those_of_the_whole_weights() -> None:
    squares = [float(WHOLE.square().sum()), 12.0]
    for norm, sums, replicas in run_on_ranks(4, norms):
        assert abs(norm / sum(squares) ** 0.5 - 1) < 1e-6
        assert sums == squares
        assert replicas == [3.0]


def test_the_norm_of_no_gradients_is_zero() -> None:
    assert float(total_norm(in_world_of_one(), [], torch.zeros(0))) == 0.0


def gather() -> dict[str, torch.Tensor]:
    mesh = mesh_of_four()
    place, shape = mesh.place, (6, 4)
    # Three blocks of two rows, each cut in halves, as in a fused QKV weight.
    sharding = Sharding(0, (2, 2, 2))
    shards = sharding.shards(shape, place.horizontal, 2)
    local = torch.cat([WHOLE[shard.slices] for shard in shards])
    tensors = {"fused": ShardedTensor(local, shape, shards, place.data == 0)}
    if mesh.rank == 3:
        tensors["of the last alone"] = ShardedTensor.full(torch.tensor([True, False]))
        tensors["nothing of"] = ShardedTensor(torch.empty(0), (2,), (), is_written=True)
    if mesh.rank == 0:
        tensors["nothing of"] = ShardedTensor(torch.tensor([5, 6]), (2,), (TensorShard((0,), (2,), (0,)),))
    return gather_full(mesh, tensors)


def test_rank_0_gets_every_tensor_whole_and_the_others_nothing() -> None:
    first, *others = run_on_ranks(4, gather)
    assert others == [{}, {}, {}]
    assert first.keys() == {"fused", "of the last alone", "nothing of"}
    assert torch.equal(first["fused"], WHOLE)
    assert first["of the last alone"].tolist() == [True, False]
    assert first["nothing of"].tolist() == [5, 6]


def test_a_process_alone_gathers_what_it_holds() -> None:
    shards = (TensorShard((0, 0), (3, 4), (0, 0)), TensorShard((3, 0), (3, 4), (3, 0)))
    found = gather_full(
        in_world_of_one(), {"both": ShardedTensor(WHOLE, (6, 4), shards), "other": ShardedTensor.full(WHOLE, False)}
    )
    assert found.keys() == {"both"}
    assert torch.equal(found["both"], WHOLE)

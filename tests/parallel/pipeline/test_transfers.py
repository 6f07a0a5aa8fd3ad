"""Tensors of any type and shape arrive as they were sent."""

from __future__ import annotations

import torch
import torch.distributed as dist

from onward.parallel.pipeline.pipeline import transfers
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")


def samples() -> list[torch.Tensor]:
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
    numbers = torch.arange(6).reshape(2, 3)
    return [
        *(numbers.to(kind) for kind in kinds),
        numbers > 2,
        numbers.T,
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.ones(1, 1, 2, 1, 1, 1, 1, 3),
    ]


def on_rank() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    rank, mine = dist.get_rank(), samples()
    received: list[torch.Tensor] = []
    if rank == 0:
        transfers.send(mine, 1, group, CPU)
    elif rank == 1:
        received = transfers.receive(len(mine), 0, group, CPU)
    shared = transfers.broadcast(mine if rank == 1 else None, len(mine), 1, group, CPU)
    nothing = transfers.broadcast([] if rank == 0 else None, 0, 0, group, CPU)
    return received, shared, nothing


def test_every_type_and_shape_arrives() -> None:
    ranks = run_on_ranks(2, on_rank)
    for found in (ranks[1][0], ranks[0][1], ranks[1][1]):
        assert len(found) == len(samples())
        for one, other in zip(found, samples(), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    assert ranks[1][2] == []

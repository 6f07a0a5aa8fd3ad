"""Collectives of context ranks are transposes of each other: gradients are those of the sum of all ranks' losses."""

from __future__ import annotations

import torch
import torch.distributed as dist

from onward.parallel.context.collectives import add_up, gather, own_part
from onward.plan.context.ranges import TokenAxis
from tests.ranks import run_on_ranks


def gradients() -> list[tuple[bool, float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    group = str(dist.group.WORLD.group_name)
    found = []
    for tokens in (TokenAxis((8,)), TokenAxis((7,)), TokenAxis((1, 6)), TokenAxis((5, 5)), TokenAxis((5,), 3)):
        full = torch.arange(3.0 * tokens.length).reshape(3, -1).double()
        part = own_part(full, 1, tokens, rank, size).clone().requires_grad_()
        gathered = gather(part, 1, tokens, size, group)
        factors = torch.stack([(full + 1).sin() * (r + 2) for r in range(size)])
        (gathered.square() * factors[rank]).sum().backward()
        expected = own_part(2 * full * factors.sum(0), 1, tokens, rank, size)
        assert part.grad is not None
        found.append((torch.equal(gathered.detach(), full), (part.grad - expected).abs().max().item()))
    x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    total = add_up(x, group)
    (total * (rank + 1)).sum().backward()
    assert x.grad is not None
    found.append((total.tolist() == [3.0, 3.0], (x.grad - 3.0).abs().max().item()))
    return found


def test_gathering_and_adding_up_have_the_gradients_of_all_ranks() -> None:
    for found in run_on_ranks(2, gradients):
        assert all(is_equal for is_equal, _ in found)
        assert max(difference for _, difference in found) < 1e-12

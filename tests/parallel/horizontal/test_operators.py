"""Collective operators by themselves: bad indices, labels, tokens and groups are named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from onward.parallel.horizontal import collectives
from onward.parallel.horizontal.loss import sharded_cross_entropy
from onward.parallel.horizontal.operators import (
    gather_full,
    local_part,
    sharded_arg_max,
    sharded_gather,
    sharded_log_softmax,
    sharded_softmax,
)
from onward.parallel.horizontal.tokens import gather_tokens, own_tokens
from onward.plan.shards import Sharding, take_shard
from tests.ranks import run_on_ranks

CUT = {"cut_axis": 1, "blocks": (7,), "size": 2}


def world() -> str:
    """The name of the group of all ranks."""
    return str(dist.group.WORLD.group_name)


def test_an_index_outside_of_the_table_is_named() -> None:
    rows = {"cut_axis": 0, "blocks": (10,), "rank": 0, "size": 2}
    with pytest.raises(ValueError, match=r"index 10 is out of range for a table of 10 rows"):
        sharded_gather(torch.zeros(5, 2), torch.tensor([3, 10]), **rows)
    with pytest.raises(ValueError, match="index -11 is out of range for a table of 10 rows"):
        sharded_gather(torch.zeros(5, 2), torch.tensor([3, -11]), **rows)


def test_parts_of_another_batch_are_found_only_where_blocks_are_equal() -> None:
    x = torch.arange(12)
    part = local_part(x, cut_axis=0, blocks=(4, 4), rank=1, size=2)
    assert part.tolist() == [2, 3, 6, 7, 10, 11]
    with pytest.raises(ValueError, match=r"an axis of 12 is not made of blocks \[4, 6\]"):
        local_part(x, cut_axis=0, blocks=(4, 6), rank=1, size=2)


def compare(_: int) -> dict[str, float]:
    """On one of two ranks: largest difference of every operator from torch's own on full tensors."""
    rank = dist.get_rank()
    cut = {**CUT, "rank": rank, "horizontal_group": world()}
    tokens_cut = {"cut_axis": 1, "blocks": (), "rank": rank, "size": 2, "horizontal_group": world()}
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 7, generator=generator, requires_grad=True)
    weights = torch.rand(5, 7, generator=generator)
    labels = torch.tensor([0, 6, 3, 2, 4])
    sharding = Sharding(1, (7,))
    part = torch.from_numpy(take_shard(whole.detach().numpy(), sharding, rank, 2).copy()).requires_grad_()
    own = torch.from_numpy(take_shard(weights.numpy(), sharding, rank, 2).copy())
    found: dict[str, float] = {}

    def note(name: str, mine: torch.Tensor, expected: torch.Tensor) -> None:
        (gradient,) = torch.autograd.grad(expected, whole)
        (local,) = torch.autograd.grad(mine, part)
        found[name] = (
            (local - torch.from_numpy(take_shard(gradient.numpy(), sharding, rank, 2).copy())).abs().max().item()
        )

    note("softmax", (sharded_softmax(part, **cut) * own).sum(), (whole.softmax(1) * weights).sum())
    note("log_softmax", (sharded_log_softmax(part, **cut) * own).sum(), (whole.log_softmax(1) * weights).sum())
    gathered = gather_full(part, **cut)
    found["gathered"] = (gathered - whole).abs().max().item()
    note("gather", (gathered * weights).sum(), (whole * weights).sum())
    class_weights = torch.arange(1.0, 8.0)
    for reduction in ("mean", "sum", "none"):
        (mine,) = sharded_cross_entropy(
            part, labels, class_weights, ignore_index=3, reduction=reduction, output_count=1, **cut
        )
        expected = torch.nn.functional.cross_entropy(whole, labels, class_weights, ignore_index=3, reduction=reduction)
        found[f"loss {reduction}"] = (mine - expected).abs().max().item()
        note(f"cross entropy {reduction}", mine.sum(), expected.sum())
    ties = torch.tensor([[1.0, 2, 2, 0, 2, 2, 1]])
    mine = torch.from_numpy(take_shard(ties.numpy(), sharding, rank, 2).copy())
    for last, place in ((0, 1), (1, 5)):
        index = sharded_arg_max(mine, axis=1, select_last_index=last, keepdims=0, **cut)
        found[f"arg max {last}"] = float(abs(int(index) - place))
    tokens = torch.arange(12.0).reshape(1, 4, 3)
    mine = own_tokens(tokens, **tokens_cut)
    again = gather_tokens(mine, **tokens_cut)
    found["tokens"] = (again - tokens).abs().max().item()
    total = collectives.reduce_scatter(tokens, 1, 2, world())
    found["reduce scatter"] = (total - 2 * mine).abs().max().item()
    return found


def test_operators_equal_torch_on_whole_tensors() -> None:
    for found in run_on_ranks(2, compare, 0):
        assert {name: value for name, value in found.items() if value > 1e-6} == {}
        assert len(found) == 14

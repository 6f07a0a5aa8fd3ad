"""Full weights behind a rank's shards, where one process holds all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from onward.engine.network.rank_shards import RankShards
from onward.parallel.launch.process import in_world_of_one


def test_one_process_holds_full_weights() -> None:
    weight = torch.ones(2, 3)
    local: Any = SimpleNamespace(
        parameter=weight,
        full_shape=(2, 3),
        is_sharded_by_zero=False,
        is_sharded_horizontally=False,
        experts="",
        shards=(),
    )
    shards = RankShards(in_world_of_one(), [local])
    sums, moment = torch.tensor([1.0, 2.0]), torch.zeros(2, 3)
    assert shards.sum_over_shards([weight, weight], sums) is sums
    assert shards.full_shape(weight) == (2, 3)
    assert shards.gather(weight, moment) is moment
    assert shards.own_shard(weight, moment) is moment

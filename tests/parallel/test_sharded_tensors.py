"""Sharded tensors: shards that are inside of their tensors, and only those."""

from __future__ import annotations

import pytest
import torch

from onward.parallel.sharded_tensors import ShardedTensor
from onward.plan.shards import TensorShard


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 3)])
def test_a_full_tensor_is_one_shard(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    sharded = ShardedTensor.full(tensor)
    zeros = (0,) * len(shape)
    assert sharded.tensor is tensor
    assert sharded.full_shape == shape
    assert sharded.shards == (TensorShard(zeros, shape, zeros),)
    assert sharded.num_elements == tensor.numel()
    assert sharded.is_written
    assert not ShardedTensor.full(tensor, is_written=False).is_written


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (TensorShard((3, 0), (2, 5), (0, 0)), r"is not inside a tensor of shape \[4, 5\]"),
        (TensorShard((0, 0), (2, 5), (1, 0)), r"is not inside a rank's tensor of shape \[2, 5\]"),
        (TensorShard((0,), (2,), (0,)), r"is not inside a tensor of shape \[4, 5\]"),
        (TensorShard((-1, 0), (1, 5), (0, 0)), r"is not inside a tensor of shape \[4, 5\]"),
    ],
)
def test_a_shard_outside_is_refused(shard: TensorShard, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ShardedTensor(torch.zeros(2, 5), (4, 5), (shard,))

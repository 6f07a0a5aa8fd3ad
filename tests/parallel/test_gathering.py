"""Full tensors from the shards that a process holds alone."""

from __future__ import annotations

import torch

from onward.parallel.gathering import describe_full, gather_full
from onward.parallel.launch.process import in_world_of_one
from onward.parallel.sharded_tensors import ShardedTensor, TensorShard


def test_what_one_process_holds() -> None:
    full = torch.arange(6.0).reshape(2, 3)
    rows = [TensorShard((row, 0), (1, 3), (1 - row, 0)) for row in range(2)]  # held in the other order
    held = {"a": ShardedTensor.full(full), "b": ShardedTensor(full.flip(0), (2, 3), tuple(rows))}
    mesh = in_world_of_one()
    found = gather_full(mesh, held)
    assert torch.equal(found["a"], full)
    assert torch.equal(found["b"], full)
    assert found["a"].data_ptr() != full.data_ptr()
    described = {name: (tuple(one.shape), str(one.device)) for name, one in describe_full(mesh, held).items()}
    assert described == dict.fromkeys(held, ((2, 3), "meta"))
    assert gather_full(mesh, {}) == {}

"""What ranks may not plan: contradictions, holes, shards alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from onward.checkpoint.writing import CheckpointWriter
from onward.parallel.sharded_tensors import ShardedTensor
from tests.checkpoint.layouts import rows_on_2
from tests.checkpoint.on_ranks import message_of, writer_of
from tests.ranks import run_on_ranks


def contradict(directory: Path) -> list[str]:
    rank = dist.get_rank()
    with writer_of(directory, blocking=True) as writer:
        shapes = message_of(lambda: writer.save(1, {"w": ShardedTensor.full(torch.zeros(3 + rank))}, {}))
        hole = message_of(lambda: writer.save(1, {"w": ShardedTensor.full(torch.zeros(3), is_written=False)}, {}))
        rows = rows_on_2(rank)
        gap = message_of(lambda: writer.save(1, rows if rank == 0 else {}, {}))
        fine = message_of(lambda: writer.save(2, rows, {}))
    return [shapes, hole, gap, fine]


def test_ranks_that_contradict_each_other_or_leave_a_hole_are_refused(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, contradict, tmp_path)
    assert first == second
    assert "ValueError: 'w' is (torch.float32, torch.Size([3])) on an earlier rank and" in first[0]
    assert "'w' is held by rank 0, and no rank writes it" in first[1]
    assert "'weights/fc' has 60 elements, and the ranks write 30 of them" in first[2]
    assert first[3] == ""


def test_a_part_of_a_tensor_alone_is_refused_in_one_process(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 1) as writer:
        writer.save(1, rows_on_2(0), {})
        with pytest.raises(ValueError, match=r"'weights/fc' has 60 elements, and the ranks write 30 of them"):
            writer.wait()

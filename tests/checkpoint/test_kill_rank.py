"""One of several ranks that save together is killed at a random moment: the latest checkpoint is complete and
consistent, at least as new as the last one known to be complete, and the other ranks do not hang."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from onward.checkpoint.reading import find_latest, list_checkpoints, read_new_tensors, read_record
from onward.checkpoint.writing import CheckpointWriter
from onward.errors import OnwardError
from onward.parallel.sharded_tensors import ShardedTensor
from onward.plan.shards import Sharding
from tests.checkpoint.layouts import sharded_like
from tests.checkpoint.saving_server import KEPT, around_disk_changes, content
from tests.ranks import run_on_ranks

RANKS = 3
LATEST_MOMENT = {0: 180, 1: 42, 2: 36}
"""Rank 0 changes the disk more often: it removes, renames and writes the manifest."""


def tensors_of(number: int, rank: int) -> dict[str, ShardedTensor]:
    """A rank's rows of the saving server's tensors."""
    tensors = {}
    for name, whole in content(number, 0).items():
        if whole.dim() == 0:
            tensors[name] = ShardedTensor.full(whole)
        else:
            sharding, shape = Sharding(0, (whole.shape[0],)), tuple(whole.shape)
            tensors[name] = sharded_like(
                whole, sharding.shards(shape, rank, RANKS), sharding.local_shape(shape, rank, RANKS)
            )
    return tensors


def save_until_killed(directory: Path, killed_rank: int, moment: int, complete: int) -> None:
    """Goes on from number `complete`; writes down every number known to be complete, and the end of the survivors."""
    rank = dist.get_rank()
    with CheckpointWriter(directory / "checkpoints", KEPT, group=dist.group.WORLD) as writer:
        passed = 0

        def die() -> None:
            nonlocal passed
            passed += 1
            if rank == killed_rank and passed == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        around_disk_changes(die)
        for number in range(complete + 1, complete + 7):
            try:
                writer.save(number, tensors_of(number, rank), {"number": number})
                writer.wait()
            except OnwardError as error:
                tell(directory / f"end of {rank}", str(error).replace("\n", " "))
                os._exit(0)
            tell(directory / f"told by {rank}", str(number))


def tell(file: Path, words: str) -> None:
    """Adds a line in one write, whenever the process is killed."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{words}\n".encode())
    os.close(descriptor)


@pytest.mark.parametrize(("seed", "kills"), [(1, 6), pytest.param(2, 60, marks=pytest.mark.slow)])
def test_a_rank_killed_at_a_random_moment_leaves_a_whole_checkpoint(tmp_path: Path, seed: int, kills: int) -> None:
    """One directory through many lives of three ranks, each life continuing from the last."""
    moments = random.Random(seed)
    directory = tmp_path / "checkpoints"
    complete = died = 0
    for life in range(kills):
        killed_rank = life % RANKS
        moment = moments.randint(1, LATEST_MOMENT[killed_rank])
        try:
            run_on_ranks(RANKS, save_until_killed, tmp_path, killed_rank, moment, complete)
        except AssertionError as error:
            assert "ended without a result" in str(error)  # noqa: PT017
            died += 1
        told = [int(line) for file in tmp_path.glob("told by *") for line in file.read_text().splitlines()]
        latest = find_latest(directory)
        if latest is None:
            assert not told
            continue
        number = read_record(latest)["number"]
        assert number >= max([complete, *told])
        read = read_new_tensors(latest)
        assert all(read[name].equal(whole) for name, whole in content(number, 0).items()), f"{latest} is a mixture"
        assert len(list_checkpoints(directory)) <= KEPT + 1
        complete = number
    assert died >= kills // 2
    assert complete > 3
    endings = [line for file in tmp_path.glob("end of *") for line in file.read_text().splitlines()]
    assert endings
    assert all("ended or stopped responding in the meantime" in text for text in endings)

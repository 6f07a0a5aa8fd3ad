"""Saving on several ranks: next to training's own collectives, on failing disks, and with ranks that differ."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from onward.checkpoint import storage, writing
from onward.checkpoint.reading import find_latest, list_checkpoints, read_new_tensors, verify
from onward.checkpoint.writing import CheckpointWriter
from tests.checkpoint.contents import same
from tests.checkpoint.layouts import full_tensors, mixed_on_4, rows_on_2
from tests.checkpoint.on_ranks import message_of, writer_of
from tests.ranks import run_on_ranks


def failing(kind: int) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise OSError(kind, os.strerror(kind))

    return fail


def train_beside(directory: Path) -> tuple[int, bool]:
    """While rank 1's disk is slow, the ranks reduce, gather and change the very tensors that are being saved."""
    rank = dist.get_rank()
    original = storage._write_bytes
    if rank == 1:
        storage._write_bytes = lambda *arguments: (time.sleep(0.05), original(*arguments))[1]
    tensors = mixed_on_4(rank)
    passes, right = 0, True
    with writer_of(directory) as writer:
        path = writer.save(1, tensors, {})
        while True:
            value = torch.full((1000,), float(rank + passes))
            dist.all_reduce(value)
            right &= bool(value.eq(6 + 4 * passes).all())
            gathered: list[Any] = [None] * 4
            dist.all_gather_object(gathered, (rank, passes))
            right &= gathered == [(other, passes) for other in range(4)]
            for sharded in tensors.values():
                sharded.tensor.zero_()
            passes += 1
            ranks_waiting = torch.tensor(float(not path.exists()))
            dist.all_reduce(ranks_waiting)  # the ranks leave the loop in the same pass
            if passes >= 20 and ranks_waiting == 0:
                break
        writer.save(2, tensors, {})
    return passes, right


def test_a_save_in_the_background_does_not_mix_with_training(tmp_path: Path) -> None:
    results = run_on_ranks(4, train_beside, tmp_path)
    assert all(right for _, right in results)
    assert min(passes for passes, _ in results) >= 20
    first, second = (read_new_tensors(path) for path in list_checkpoints(tmp_path))
    assert [name for name, whole in full_tensors().items() if not same(first[name], whole)] == []
    assert not any(tensor.bool().any() for tensor in second.values())


def fill_the_disk_of(full_rank: int, directory: Path) -> list[str]:
    """Save 1 is fine; during save 2 one rank's disk is full; then it is not any more, and save 3 is fine."""
    tensors = rows_on_2(dist.get_rank())
    original = storage._write_bytes
    with writer_of(directory) as writer:
        writer.save(1, tensors, {})
        writer.wait()
        dist.barrier()
        if dist.get_rank() == full_rank:
            storage._write_bytes = failing(errno.ENOSPC)
        writer.save(2, tensors, {})
        words = [message_of(writer.wait)]
        storage._write_bytes = original
        dist.barrier()
        words.append(" ".join(sorted(path.name for path in directory.iterdir())))
        dist.barrier()
        writer.save(3, tensors, {})
        writer.wait()
    return words


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_told_on_every_rank(tmp_path: Path, full_rank: int) -> None:
    first, second = run_on_ranks(2, fill_the_disk_of, full_rank, tmp_path)
    assert first == second
    path = tmp_path / "checkpoint-00000002"
    needed = sum(sharded.tensor.nbytes for sharded in rows_on_2(full_rank).values())
    start = f"StorageError: rank {full_rank}: {path} could not be written: No space left on device. "
    assert first[0].startswith(start)
    # What both ranks hold, one of them writes.
    assert int(first[0].removeprefix(start).split()[0].replace(",", "")) in range(needed - 4, needed + 1)
    assert " bytes are free on its file system. Free some space, or name another disk" in first[0]
    assert first[1] == "checkpoint-00000001"
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000001", "checkpoint-00000003"]
    verify(tmp_path / "checkpoint-00000003")


def refuse_removal(directory: Path) -> str:
    """Three saves of which two are kept; rank 0, which removes the oldest, is refused."""
    writing.remove = failing(errno.EROFS)
    with writer_of(directory, blocking=True) as writer:
        for number in (1, 2):
            writer.save(number, rows_on_2(dist.get_rank()), {})
        return message_of(lambda: writer.save(3, rows_on_2(dist.get_rank()), {}))


def test_an_old_checkpoint_that_cannot_be_removed_is_told_on_every_rank(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, refuse_removal, tmp_path)
    assert first == second
    assert first.startswith(
        f"StorageError: rank 0: {tmp_path / 'checkpoint-00000001'} could not be removed to make room"
    )
    assert find_latest(tmp_path) == tmp_path / "checkpoint-00000003"


def start_on_own_disks(directory: Path) -> str:
    return message_of(lambda: writer_of(directory / f"node {dist.get_rank()}"))


def test_a_directory_that_is_not_shared_is_told_at_the_start(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"node {rank}").mkdir()
    first, second = run_on_ranks(2, start_on_own_disks, tmp_path)
    assert first == second
    assert first.startswith(
        f"StorageError: rank 1: {tmp_path / 'node 1'} is not one directory for all ranks: it does not"
    )
    assert "checkpoint.checkpoints_dir must be on a disk that all nodes share; name one there." in first
    assert list((tmp_path / "node 0").iterdir()) == []


def start_where_nothing_can_be(directory: Path) -> str:
    return message_of(lambda: writer_of(directory / "file" / "checkpoints"))


def test_a_directory_that_cannot_be_made_is_told_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    first, second = run_on_ranks(2, start_where_nothing_can_be, tmp_path)
    assert first == second
    assert first.startswith("StorageError: rank 0: ")
    assert "could not be prepared for checkpoints: Not a directory" in first


def lose_the_shared_disk(directory: Path) -> list[str]:
    """The share goes away from rank 1's node after the start: with the path gone, then with a local folder there."""
    tensors = rows_on_2(dist.get_rank())
    with writer_of(directory / "shared", blocking=True) as writer:
        words = []
        if dist.get_rank() == 1:
            writer.directory = directory / "local"
        words.append(message_of(lambda: writer.save(1, tensors, {})))
        dist.barrier()
        if dist.get_rank() == 1:
            (directory / "local" / ".tmp-onward-checkpoint-00000001").mkdir(parents=True)
        dist.barrier()
        words.append(message_of(lambda: writer.save(1, tensors, {})))
    return words


def test_a_disk_that_is_no_longer_shared_is_reported(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, lose_the_shared_disk, tmp_path)
    assert first == second
    assert "rank 1: " in first[0]
    assert "it does not see .tmp-onward-checkpoint-00000001, which rank 0 made there" in first[0]
    assert "rank 0 does not see rank-00001.safetensors, written by other ranks" in first[1]
    assert all("checkpoint.checkpoints_dir must be on a disk that all nodes share" in words for words in first)
    assert list_checkpoints(tmp_path / "shared") == []


def end_during_save(directory: Path) -> None:
    """Rank 1 leaves without a word when it is its turn to write; rank 0 must not wait for it."""
    if dist.get_rank() == 1:
        storage._write_file = lambda *_: os._exit(1)
    writer = writer_of(directory)
    writer.save(1, rows_on_2(dist.get_rank()), {})
    (directory / "words").write_text(message_of(writer.wait))


def test_a_rank_that_ends_during_a_save_is_told_to_the_others(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 2) as writer:
        kept = writer.save(0, full_tensors(), {})
    with pytest.raises(AssertionError, match="rank 1 ended without a result"):
        run_on_ranks(2, end_during_save, tmp_path)
    words = (tmp_path / "words").read_text()
    assert "one of the 2 ranks ended or stopped responding in the meantime (seen on rank 0: " in words
    assert words.endswith("Checkpoints completed earlier are intact.")
    assert list_checkpoints(tmp_path) == [kept]
    verify(kept)

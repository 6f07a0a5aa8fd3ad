"""Files arrive as they were sent, in any topology; whatever fails on one rank is an error on all, and no hang."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch.distributed as dist

from onward.checkpoint.manifest import FileEntry
from onward.checkpoint.memory import file_transfer
from onward.checkpoint.memory.file_transfer import Transfer, transfer_files
from tests.checkpoint.on_ranks import message_of
from tests.ranks import run_on_ranks

RANKS = 3


def content(name: str, size: int) -> bytes:
    return (hashlib.sha256(name.encode()).digest() * (size // 32 + 1))[:size]


def entry(name: str, size: int) -> FileEntry:
    return FileEntry(name, size, hashlib.sha256(content(name, size)).hexdigest())


A, B, EMPTY = entry("a", 300_001), entry("b", 70_000), entry("empty", 0)
TRANSFERS = [Transfer(A, 0, 1), Transfer(A, 0, 2), Transfer(B, 1, 2), Transfer(B, 1, 0), Transfer(EMPTY, 2, 0)]
HELD = {0: [A], 1: [B], 2: [EMPTY]}


def send(folder: Path, fault: str) -> str:
    rank = dist.get_rank()
    own = folder / str(rank)
    own.mkdir()
    file_transfer.BUFFER_BYTES = 200_000  # several chunks of the larger file
    for one in HELD[rank]:
        (own / one.name).write_bytes(content(one.name, one.size_bytes))
    if fault == "changed" and rank == 1:
        (own / "b").write_bytes(content("c", B.size_bytes))
    if fault == "missing" and rank == 0:
        (own / "a").unlink()
    if fault == "cut off" and rank == 0:
        (own / "a").write_bytes(content("a", 80_000))
    if fault == "unwritable" and rank == 2:
        (own / "a").mkdir()
    return message_of(lambda: transfer_files(dist.group.WORLD, TRANSFERS, own))


def test_files_arrive(tmp_path: Path) -> None:
    assert run_on_ranks(RANKS, send, tmp_path, "") == [""] * RANKS
    for one in TRANSFERS:
        name, size = one.entry.name, one.entry.size_bytes
        assert (tmp_path / str(one.target) / name).read_bytes() == content(name, size)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("changed", "CheckpointError: rank 0: {}/0/b arrived from rank 1 with the SHA-256 "),
        ("missing", "CheckpointError: rank 0: {}/0/a could not be read: [Errno 2] No such file or directory"),
        ("cut off", "CheckpointError: rank 1: {}/1/a arrived from rank 0 with the SHA-256 "),
        ("unwritable", "StorageError: rank 2: {}/2/a could not be written: [Errno 21] Is a directory"),
    ],
)
def test_a_fault_of_one_rank_is_an_error_on_all(tmp_path: Path, fault: str, words: str) -> None:
    found = run_on_ranks(RANKS, send, tmp_path, fault)
    assert found == [found[0]] * RANKS
    assert found[0].startswith(words.format(tmp_path))
    if fault == "unwritable":
        assert "300,001 bytes are needed. Free memory, or set checkpoint.memory_dir to another folder." in found[0]


def test_nothing_to_send_needs_no_group(tmp_path: Path) -> None:
    transfer_files(None, [], tmp_path)

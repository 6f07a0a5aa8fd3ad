"""The newest checkpoint in memory of which every file is left is chosen, and whatever is not used is reported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from onward.checkpoint.memory.choosing import OnDisk, choose_in_memory
from onward.checkpoint.memory.nodes import prepare_nodes
from tests.checkpoint.memory.on_nodes import root_of, save
from tests.checkpoint.test_kill_rank import RANKS, tensors_of
from tests.ranks import run_on_ranks

MARKER = {"memory": {"layout": "", "disk_sequence": 3}}


def save_one(folder: Path, number: int) -> None:
    save(folder, {number: tensors_of(number, dist.get_rank())}, record=MARKER)


def choose(folder: Path, on_disk: OnDisk) -> tuple[str | None, list[str]]:
    group, root = dist.group.WORLD, root_of(folder)
    chosen, notes = choose_in_memory(root, prepare_nodes(root, group), group, on_disk)
    assert chosen is None or (chosen.path / "manifest.json").is_file()
    return None if chosen is None else chosen.path.name, notes


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run_on_ranks(RANKS, save_one, tmp_path, 5)
    return tmp_path


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("memory*/onward-run/*")}


def chosen_in(folder: Path, on_disk: OnDisk) -> Any:
    results = run_on_ranks(RANKS, choose, folder, on_disk)
    assert results == [results[0]] * RANKS
    return results[0]


def file_of(folder: Path, node: int, rank: int) -> Path:
    return folder / f"memory{node}" / "onward-run" / "checkpoint-00000005" / f"rank-{rank:05d}.safetensors"


def test_a_damaged_file_is_replaced_by_its_copy(saved: Path) -> None:
    with file_of(saved, 0, 0).open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\xaa")
    file_of(saved, 1, 1).write_bytes(b"")
    assert chosen_in(saved, OnDisk(4, 3)) == ("checkpoint-00000005", [])


def test_a_file_that_is_nowhere_is_reported(saved: Path) -> None:
    file_of(saved, 0, 0).unlink()
    file_of(saved, 1, 0).write_bytes(b"damaged")
    note = "checkpoint-00000005 in memory is not used: of its 3 files, 1 are on no node, 1 of them damaged."
    assert chosen_in(saved, OnDisk(4, 3)) == (None, [note])
    assert not left(saved), "what is not used is removed"


def test_two_neighbours_lost_are_reported(saved: Path) -> None:
    shutil.rmtree(saved / "memory0")
    shutil.rmtree(saved / "memory1")
    note = "checkpoint-00000005 in memory is not used: of its 3 files, 1 are on no node."
    assert chosen_in(saved, OnDisk(4, 3)) == (None, [note])


@pytest.mark.parametrize("update", [5, 6])
def test_one_that_is_as_new_on_disk_is_not_used(saved: Path, update: int) -> None:
    assert chosen_in(saved, OnDisk(update, 4)) == (None, [])
    assert not left(saved)


def test_a_run_that_goes_back_does_not_use_later_ones(saved: Path) -> None:
    """Its user has removed the third checkpoint on disk."""
    note = (
        "checkpoint-00000005 in memory is not used: a checkpoint that was on disk when it was taken has been removed "
        "since, so that the run goes back to an earlier one."
    )
    assert chosen_in(saved, OnDisk(2, 2)) == (None, [note])


def test_an_incomplete_newer_one_leaves_the_one_before(saved: Path) -> None:
    """As after a death between the moments at which two nodes have renamed theirs."""
    for node in range(RANKS):
        root = saved / f"memory{node}" / "onward-run"
        shutil.copytree(root / "checkpoint-00000005", root / "kept")
    run_on_ranks(RANKS, save_one, saved, 6)
    for node in range(RANKS):
        root = saved / f"memory{node}" / "onward-run"
        (root / "kept").rename(root / "checkpoint-00000005")
        if node:
            shutil.rmtree(root / "checkpoint-00000006")
    note = "checkpoint-00000006 in memory is not used: of its 3 files, 1 are on no node."
    assert chosen_in(saved, OnDisk(4, 3)) == ("checkpoint-00000005", [note])
    assert left(saved) == {"checkpoint-00000005"}

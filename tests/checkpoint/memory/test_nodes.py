"""Nodes are found by what ranks see; every file has its copy on another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from onward.checkpoint.disk import TEMPORARY_PREFIX
from onward.checkpoint.memory.nodes import Nodes, group_by_folder, prepare_nodes
from onward.errors import StorageError
from tests.checkpoint.on_ranks import message_of
from tests.ranks import run_on_ranks


@pytest.mark.parametrize(
    ("ranks", "keepers"),
    [
        ([(0, 1, 2)], {}),
        ([(0,), (1,)], {0: 1, 1: 0}),
        ([(0, 2), (1, 3)], {0: 1, 2: 3, 1: 0, 3: 2}),
        ([(0, 1, 2), (3,), (4, 5)], {0: 3, 1: 3, 2: 3, 3: 4, 4: 0, 5: 1}),
    ],
)
def test_every_file_has_its_copy_on_the_next_node(ranks: list[tuple[int, ...]], keepers: dict[int, int]) -> None:
    nodes = Nodes(tuple(ranks), 0)
    assert nodes.keepers == keepers
    of = {rank: node for node in ranks for rank in node}
    assert all(of[rank] != of[keeper] for rank, keeper in keepers.items())
    sizes = [10**rank for rank in range(len(of))]
    held = {node[0]: sum(sizes[r] for r in of if r in node or keepers.get(r) in node) for node in ranks}
    assert nodes.bytes_needed(sizes) == held


def test_ranks_that_see_the_same_marks_share_a_folder() -> None:
    nodes = group_by_folder([[0, 3], [1, 2], [1, 2], [0, 3]], rank=2)
    assert (nodes.ranks, nodes.own, nodes.is_first) == (((0, 3), (1, 2)), (1, 2), False)
    assert [list(Nodes(nodes.ranks, rank).share(5)) for rank in (1, 2)] == [[0, 2, 4], [1, 3]]


def find_nodes(folder: Path, ranks_of_node: int) -> tuple[tuple[int, ...], ...]:
    root = folder / f"memory{dist.get_rank() // ranks_of_node}" / "onward-run"
    return prepare_nodes(root, dist.group.WORLD).ranks


@pytest.mark.parametrize(("ranks_of_node", "expected"), [(2, ((0, 1), (2,))), (3, ((0, 1, 2),))])
def test_nodes_are_found_and_leftovers_removed(
    tmp_path: Path, ranks_of_node: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    root = tmp_path / "memory0" / "onward-run"
    (root / f"{TEMPORARY_PREFIX}checkpoint-00000001").mkdir(parents=True)
    root.chmod(0o700)
    (root / "checkpoint-00000001").mkdir()
    assert run_on_ranks(3, find_nodes, tmp_path, ranks_of_node) == [expected] * 3
    assert [path.name for path in root.iterdir()] == ["checkpoint-00000001"]
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "onward-run"
    root.mkdir()
    root.chmod(0o777)
    remedy = "Remove it, or set checkpoint.memory_dir to another folder."
    with pytest.raises(StorageError) as caught:
        prepare_nodes(root, None)
    assert str(caught.value) == f"{root} can be written to by others (mode 777). {remedy}"
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(StorageError) as caught:
        prepare_nodes(root, None)
    assert str(caught.value) == f"{root} is no folder. {remedy}"
    root.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "onward-run"
    root.mkdir(mode=0o700)
    os.chown(root, 12345, 12345)
    with pytest.raises(StorageError, match="belongs to user 12345, and this run is of user 0"):
        prepare_nodes(root, None)


def prepare_a_file(folder: Path) -> str:
    root = folder / ("file" if dist.get_rank() else "memory") / "onward-run"
    return message_of(lambda: prepare_nodes(root, dist.group.WORLD))


def test_memory_that_one_rank_cannot_write_to_is_refused_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = run_on_ranks(2, prepare_a_file, tmp_path)
    assert words[0] == words[1]
    assert "rank 1: " in words[0]
    assert "could not be prepared for checkpoints in memory: " in words[0]
    assert "such as /dev/shm, or leave out checkpoint.memory_period_updates." in words[0]

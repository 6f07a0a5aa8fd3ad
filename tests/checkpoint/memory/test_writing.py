"""Checkpoints in memory: each node has its own files and copies of another's; a rank killed at any moment, and a node
that is lost with its memory, leave a complete one."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from onward.checkpoint.manifest import MANIFEST_NAME
from onward.checkpoint.memory.choosing import OnDisk, choose_in_memory
from onward.checkpoint.memory.nodes import prepare_nodes
from onward.checkpoint.memory.writing import MemoryWriter, rank_of_file
from onward.checkpoint.reading import checkpoint_number
from onward.errors import OnwardError
from tests.checkpoint.memory.on_nodes import root_of, save
from tests.checkpoint.saving_server import around_disk_changes
from tests.checkpoint.test_kill_rank import RANKS, tell, tensors_of
from tests.ranks import run_on_ranks

LATEST_MOMENT = 160


def save_twice(folder: Path, ranks_of_node: int) -> None:
    save(folder, {number: tensors_of(number, dist.get_rank()) for number in (1, 2)}, ranks_of_node)


@pytest.mark.parametrize(
    ("ranks_of_node", "expected"),
    [(1, {0: {0, 2}, 1: {0, 1}, 2: {1, 2}}), (2, {0: {0, 1, 2}, 1: {0, 1, 2}}), (3, {0: {0, 1, 2}})],
)
def test_every_node_has_its_files_and_anothers(
    tmp_path: Path, ranks_of_node: int, expected: dict[int, set[int]]
) -> None:
    run_on_ranks(RANKS, save_twice, tmp_path, ranks_of_node)
    manifests = set()
    for node, ranks in expected.items():
        (path,) = (tmp_path / f"memory{node}" / "onward-run").iterdir()
        assert path.name == "checkpoint-00000002"
        manifests.add((path / MANIFEST_NAME).read_bytes())
        assert {rank_of_file(file.name) for file in path.glob("*.safetensors")} == ranks
    assert len(manifests) == 1


def save_until_killed(folder: Path, killed_rank: int, moment: int) -> None:
    """Goes on from what is in memory; writes down every number known to be complete."""
    rank, group, root = dist.get_rank(), dist.group.WORLD, root_of(folder)
    nodes = prepare_nodes(root, group)
    chosen, _ = choose_in_memory(root, nodes, group, OnDisk())
    number = 0 if chosen is None else checkpoint_number(chosen.path)
    tell(folder / f"resumed {rank}", str(number))
    passed = 0

    def die() -> None:
        nonlocal passed
        passed += 1
        if rank == killed_rank and passed == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    around_disk_changes(die)
    with MemoryWriter(root, nodes, group) as writer:
        for later in range(number + 1, number + 7):
            try:
                writer.save(later, tensors_of(later, rank), {})
                writer.wait()
            except OnwardError:
                os._exit(0)
            tell(folder / f"told by {rank}", str(later))


@pytest.mark.parametrize(("seed", "kills"), [(1, 5), pytest.param(2, 60, marks=pytest.mark.slow)])
def test_a_node_lost_at_a_random_moment_leaves_a_complete_checkpoint(tmp_path: Path, seed: int, kills: int) -> None:
    """After a loss, copies are made again by the next save; only then another node may be lost."""
    moments = random.Random(seed)
    died = wiped = told = 0
    told_at_loss = -1
    for life in range(kills):
        victim, died_before = life % RANKS, died
        try:
            run_on_ranks(RANKS, save_until_killed, tmp_path, victim, moments.randint(1, LATEST_MOMENT))
        except AssertionError as error:
            assert "ended without a result" in str(error)  # noqa: PT017
            died += 1
        resumed = [int(file.read_text().split()[-1]) for file in sorted(tmp_path.glob("resumed *"))]
        assert resumed == [resumed[0]] * RANKS, "all ranks choose the same"
        assert resumed[0] >= told, "nothing that was complete before is lost"
        lines = [int(line) for file in tmp_path.glob("told by *") for line in file.read_text().splitlines()]
        told = max(lines, default=0)
        if died > died_before and told > told_at_loss and moments.random() < 0.6:
            shutil.rmtree(tmp_path / f"memory{victim}")
            wiped, told_at_loss = wiped + 1, told
    assert died >= kills // 2
    assert wiped >= kills // 5
    assert told > 3

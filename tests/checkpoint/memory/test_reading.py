"""A checkpoint spread over the memory of several nodes is read in any layout, also when a node is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from onward.checkpoint.memory.choosing import OnDisk, choose_in_memory
from onward.checkpoint.memory.nodes import prepare_nodes
from onward.checkpoint.memory.reading import read_from_memory
from tests.checkpoint.layouts import LAYOUTS
from tests.checkpoint.memory.on_nodes import root_of, save
from tests.ranks import run_on_ranks


def save_in(layout: str, folder: Path, ranks_of_node: int) -> None:
    save(folder, {7: LAYOUTS[layout][1](dist.get_rank())}, ranks_of_node)


def read_in(layout: str, folder: Path) -> tuple[list[str], int]:
    """Names of the tensors that are not as they were saved, and the files on this node."""
    rank, group, root = dist.get_rank(), dist.group.WORLD, root_of(folder)
    nodes = prepare_nodes(root, group)
    chosen, notes = choose_in_memory(root, nodes, group, OnDisk())
    assert chosen is not None, notes
    expected, into = LAYOUTS[layout][1](rank), LAYOUTS[layout][1](rank)
    for sharded in into.values():
        sharded.tensor.zero_()
    assert read_from_memory(chosen, into, nodes, group) == ()
    different = [name for name, one in into.items() if not torch.equal(one.tensor, expected[name].tensor)]
    return different, len(list(chosen.path.glob("*.safetensors")))


@pytest.mark.parametrize(
    ("saved", "ranks_of_node", "lost", "read"),
    [
        ("zero on 3", 1, 0, "zero on 3"),
        ("mixed on 4", 2, 0, "mixed on 4"),
        ("mixed on 4", 1, 3, "zero on 3"),
        ("zero on 3", 1, 2, "rows on 2"),
        ("stages on 3", 1, 1, "fused on 2"),
    ],
)
def test_every_layout_reads_every_other_without_one_node(
    tmp_path: Path, saved: str, ranks_of_node: int, lost: int, read: str
) -> None:
    run_on_ranks(LAYOUTS[saved][0], save_in, saved, tmp_path, ranks_of_node)
    shutil.rmtree(tmp_path / f"memory{lost}")
    results = run_on_ranks(LAYOUTS[read][0], read_in, read, tmp_path)
    assert [different for different, _ in results] == [[]] * len(results)


def test_nodes_get_only_the_files_that_they_need(tmp_path: Path) -> None:
    """The second of three stages has no tensors; the third shares one with the first, which has written it."""
    run_on_ranks(3, save_in, "stages on 3", tmp_path, 1)
    shutil.rmtree(tmp_path / "memory1")
    assert [count for _, count in run_on_ranks(3, read_in, "stages on 3", tmp_path)] == [2, 0, 2]

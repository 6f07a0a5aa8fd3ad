"""Writers of checkpoints in memory, on ranks whose memory is a folder of their node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from onward.checkpoint.memory.nodes import prepare_nodes
from onward.checkpoint.memory.writing import MemoryWriter
from onward.parallel.messages import Json
from onward.parallel.sharded_tensors import ShardedTensor

RANKS_OF_NODE = 1


def root_of(folder: Path, ranks_of_node: int = RANKS_OF_NODE) -> Path:
    """The memory of this rank's node."""
    return folder / f"memory{dist.get_rank() // ranks_of_node}" / "onward-run"


def save(
    folder: Path,
    tensors: Mapping[int, Mapping[str, ShardedTensor]],
    ranks_of_node: int = RANKS_OF_NODE,
    record: Mapping[str, Json] | None = None,
) -> None:
    """Saves checkpoints, by number, into the memory of all nodes."""
    group, root = dist.group.WORLD, root_of(folder, ranks_of_node)
    with MemoryWriter(root, prepare_nodes(root, group), group) as writer:
        for number, one in tensors.items():
            writer.save(number, one, record or {})

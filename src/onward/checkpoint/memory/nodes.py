"""Which ranks share a folder in host memory, and on which other node each rank's file has its copy."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from onward.checkpoint.agreement import do_together, gather_from_all, rank_and_size
from onward.checkpoint.disk import TEMPORARY_PREFIX, clear_leftovers
from onward.errors import StorageError


@dataclass(frozen=True)
class Nodes:
    """The ranks of a group by the folder that they see.

    Attributes:
        ranks: of each node, in order; nodes by their first rank.
        rank: this process.
    """

    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def own(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return next(node for node in self.ranks if self.rank in node)

    @property
    def is_first(self) -> bool:
        """Whether this rank makes, renames and removes the folders of its node."""
        return self.rank == self.own[0]

    @property
    def keepers(self) -> dict[int, int]:
        """Rank -> the rank of the next node that keeps a copy of its file; empty where there is one node."""
        if len(self.ranks) == 1:
            return {}
        following = zip(self.ranks, (*self.ranks[1:], self.ranks[0]), strict=True)
        return {rank: after[place % len(after)] for node, after in following for place, rank in enumerate(node)}

    def share(self, count: int) -> range:
        """Which of `count` items this rank looks at for its node."""
        return range(self.own.index(self.rank), count, len(self.own))

    def bytes_needed(self, written: Sequence[int]) -> dict[int, int]:
        """First rank of each node -> bytes of one checkpoint there, its own files and copies.

        Args:
            written: bytes of every rank's file.
        """
        needed = {node[0]: sum(written[rank] for rank in node) for node in self.ranks}
        first = {rank: node[0] for node in self.ranks for rank in node}
        for rank, keeper in self.keepers.items():
            needed[first[keeper]] += written[rank]
        return needed


def group_by_folder(seen: Sequence[Sequence[int]], rank: int) -> Nodes:
    """Nodes from the ranks whose marks every rank sees; ranks that see the same ones share a folder."""
    return Nodes(tuple(sorted({tuple(ranks) for ranks in seen})), rank)


def prepare_nodes(root: Path, group: dist.ProcessGroup | None) -> Nodes:
    """Makes the folder of a run in the memory of every node, removes leftovers, and finds out who shares it.

    Args:
        root: of this rank; nodes may have it in different places.
        group: the ranks; None: this process alone.

    Raises:
        StorageError: it cannot be made, or belongs to somebody else; on every rank.
    """
    rank, _ = rank_and_size(group)
    mark = root / f"{TEMPORARY_PREFIX}shared-{uuid.uuid4().hex}"

    def make() -> None:
        try:
            root.parent.mkdir(parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
            _refuse_foreign(root)
            mark.touch()
        except OSError as error:
            raise unwritable(root, error) from error

    do_together(group, make)
    try:
        marks = gather_from_all(group, mark.name)
        seen = gather_from_all(group, [one for one, name in enumerate(marks) if (root / name).exists()])
    finally:
        mark.unlink(missing_ok=True)
    nodes = group_by_folder(seen, rank)

    def clear() -> None:
        if nodes.is_first:
            clear_leftovers(root)

    do_together(group, clear)
    return nodes


def unwritable(root: Path, error: OSError) -> StorageError:
    """The error for a folder in memory that cannot be written to."""
    return StorageError(
        f"{root} could not be prepared for checkpoints in memory: {error.strerror or error}. Set checkpoint.memory_dir "
        "to a folder in memory that you may write to, such as /dev/shm, or leave out checkpoint.memory_period_updates."
    )


def _refuse_foreign(root: Path) -> None:
    """Anybody may make folders in shared memory; a run resumes only from what its own user wrote."""
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode):
        problem = "is no folder"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, and this run is of user {os.geteuid()}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written to by others (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise StorageError(f"{root} {problem}. Remove it, or set checkpoint.memory_dir to another folder.")

"""The checkpoints of a run in the memory of its hosts: saved every so many updates, read after a failure, removed when
the disk has as new a one."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from onward.checkpoint.agreement import do_together, gather_from_all
from onward.checkpoint.disk import discard, make_directory
from onward.checkpoint.memory.choosing import Chosen, OnDisk, choose_in_memory
from onward.checkpoint.memory.nodes import prepare_nodes
from onward.checkpoint.memory.reading import read_from_memory
from onward.checkpoint.memory.writing import MemoryWriter
from onward.checkpoint.reading import checkpoint_number, find_latest, sequence_of
from onward.checkpoint.run_files import RunFiles
from onward.errors import CheckpointError, StorageError
from onward.operating_system import free_memory_bytes
from onward.parallel.launch.process import Mesh
from onward.parallel.messages import Json
from onward.parallel.sharded_tensors import ShardedTensor
from onward.parameters import Checkpoint
from onward.untrusted_files import RefusedFile, read_text

SHARED_MEMORY = Path("/dev/shm")
ID_NAME = ".onward-memory-id"
"""A file in the folder of checkpoints with which the run recognizes its own checkpoints in memory."""
_ID = re.compile("[0-9a-f]{32}")
GENERATIONS = 2
"""The one before is removed when the new one is complete."""


class RunMemory:
    """Checkpoints in memory, of all ranks together.

    Args:
        settings: of a run with `memory_period_updates` and `checkpoints_dir`.
        mesh: the ranks.
        files: of the run.

    Attributes:
        chosen: the checkpoint that the run resumes from; None: it resumes from none in memory.

    Raises:
        StorageError: memory cannot be written to; on every rank.
    """

    def __init__(self, settings: Checkpoint, mesh: Mesh, files: RunFiles) -> None:
        folder = settings.checkpoints_dir
        assert folder is not None
        self._mesh = mesh

        def identify() -> str:
            return _own_id(folder, files) if mesh.rank == 0 else ""

        identity = gather_from_all(mesh.control, do_together(mesh.control, identify))[0]
        self.root = _root(settings, identity)
        self.nodes = prepare_nodes(self.root, mesh.control)
        self.chosen: Chosen | None = None
        self._writer: MemoryWriter | None = None

    def find(self, on_disk: Path | None, notify: Callable[[str], None]) -> Path | None:
        """The checkpoint in memory to resume from, on this rank's node; None: the one on disk is to be used.

        Args:
            on_disk: the newest checkpoint there.
            notify: called on rank 0.

        Raises:
            StorageError, OnwardError: on every rank.
        """
        disk = OnDisk() if on_disk is None else OnDisk(checkpoint_number(on_disk), sequence_of(on_disk))
        self.chosen, notes = choose_in_memory(self.root, self.nodes, self._mesh.control, disk)
        for note in notes if self._mesh.rank == 0 else ():
            notify(f"{note} {'Training starts over.' if on_disk is None else f'Resuming from {on_disk.name} on disk.'}")
        return None if self.chosen is None else self.chosen.path

    def read(self, into: Mapping[str, ShardedTensor], optional: tuple[str, ...]) -> tuple[str, ...]:
        """Reads what `find` chose. Raises as `read_sharded_tensors` does."""
        assert self.chosen is not None
        return read_from_memory(self.chosen, into, self.nodes, self._mesh.control, optional)

    @property
    def place(self) -> str:
        """Where the chosen checkpoint is, for a message."""
        assert self.chosen is not None
        count = len(self.nodes.ranks)
        return f"{self.chosen.path.name} in the memory of {'this node' if count == 1 else f'{count} nodes'}"

    def open(self, tensors: Mapping[str, ShardedTensor]) -> None:
        """Readies memory for saves of these tensors.

        Raises:
            StorageError: a node has too little memory; on every rank, with numbers.
        """
        if self._writer is not None:
            return
        own = sum(
            one.num_elements * one.tensor.element_size() for one in tensors.values() if one.is_written and one.shards
        )
        written = gather_from_all(self._mesh.control, own)
        do_together(self._mesh.control, lambda: self._check_room(written))
        self._writer = MemoryWriter(self.root, self.nodes, self._mesh.control)

    def _check_room(self, written: list[int]) -> None:
        if not self.nodes.is_first:
            return
        one = self.nodes.bytes_needed(written)[self._mesh.rank]
        held = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        needed, copies = GENERATIONS * one, one - sum(written[rank] for rank in self.nodes.own)
        free_there = shutil.disk_usage(self.root).free + held
        # What is in memory as files is not counted as free; each rank has one more copy, from which it writes.
        free = free_memory_bytes() + held - (one - copies)
        if needed > min(free_there, free):
            ranks = len(self.nodes.own)
            raise StorageError(
                f"checkpoint.memory_period_updates: {GENERATIONS} checkpoints in memory need {needed:,} bytes on the "
                f"node of rank {self._mesh.rank} ({ranks} rank{'s' if ranks > 1 else ''} with {one - copies:,} bytes, "
                f"and {copies:,} bytes of copies for another node, each {GENERATIONS} times); {self.root.parent} has "
                f"{free_there:,} bytes free, and the machine's memory {max(0, int(free)):,}. Enlarge that "
                "folder or the memory of the container, name another folder in checkpoint.memory_dir, shard the state "
                "(distributed.zero_stage), or leave out checkpoint.memory_period_updates."
            )

    def save(
        self,
        number: int,
        tensors: Mapping[str, ShardedTensor],
        record: Mapping[str, Json],
        rank_record: Mapping[str, Json],
        disk_sequence: int,
    ) -> str | None:
        """Starts a checkpoint; the caller may change tensors and records as soon as this returns.

        Args:
            number: weight updates done.
            tensors, record, rank_record: see `CheckpointWriter.save`.
            disk_sequence: on rank 0, of the newest complete checkpoint on disk.

        Returns:
            What to report where memory cannot hold checkpoints for the time being; None: all is well.
        """
        self.open(tensors)
        assert self._writer is not None
        marker: Json = {"layout": self._mesh.topology.as_text, "disk_sequence": disk_sequence}
        try:
            self._writer.save(number, tensors, {**record, "memory": marker}, rank_record)
        except (StorageError, CheckpointError) as error:
            return f"{error} Training continues, and the next one is attempted."
        return None

    def clear(self) -> None:
        """Removes all checkpoints of this run from the memory of all nodes; all ranks call this.

        Raises:
            OnwardError: a rank is gone.
        """
        if self._writer is not None:
            with contextlib.suppress(StorageError, CheckpointError):
                self._writer.wait()
        self.chosen = None

        def remove() -> None:
            if self.nodes.is_first:
                for path in self.root.iterdir():
                    discard(path)

        do_together(self._mesh.control, remove)

    def close(self) -> None:
        """`clear`, and removes the folder."""
        self.clear()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self.nodes.is_first:
            with contextlib.suppress(OSError):
                self.root.rmdir()


def newest_here(settings: Checkpoint) -> Path | None:
    """The newest checkpoint of a run on this machine that may be resumed from, on disk or in memory; None: there is
    none. For a launcher on this machine; the ranks decide from which one they resume.

    Raises:
        CheckpointError: the newest one on disk is damaged.
    """
    folder = settings.checkpoints_dir
    if folder is None:
        return None
    on_disk = find_latest(folder)
    identity, in_memory = _read_id(folder) if settings.memory_period_updates else None, None
    with contextlib.suppress(CheckpointError):  # what is damaged in memory is not used
        in_memory = None if identity is None else find_latest(_root(settings, identity))
    found = [path for path in (on_disk, in_memory) if path is not None]
    return max(found, key=checkpoint_number, default=None)


def _root(settings: Checkpoint, identity: str) -> Path:
    return (settings.memory_dir or SHARED_MEMORY) / f"onward-{identity}"


def _read_id(folder: Path) -> str | None:
    try:
        text = read_text(folder / ID_NAME).strip()
    except (OSError, UnicodeDecodeError, RefusedFile):
        return None
    return text if _ID.fullmatch(text) else None


def _own_id(folder: Path, files: RunFiles) -> str:
    """What names the run's folders in memory: it is removed with the folder of checkpoints, and so is of no other run.

    Raises:
        StorageError: it cannot be written.
    """
    identity = _read_id(folder)
    if identity is None:
        identity, path = secrets.token_hex(16), folder / ID_NAME
        try:
            make_directory(folder)
            path.write_text(f"{identity}\n", encoding="ascii")
        except OSError as error:
            raise StorageError(
                f"{path} could not be written: {error.strerror or error}. Get write permission there, or name another "
                "directory in checkpoint.checkpoints_dir."
            ) from error
        files.publish_next_to_checkpoints(path)
    return identity

"""Saving into the memory of the hosts: a checkpoint as on disk, of which each node has the files of its own ranks and
copies of another node's. The one before is removed only when the new one is complete on all nodes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from onward.checkpoint.agreement import do_together
from onward.checkpoint.disk import TEMPORARY_PREFIX, discard, publish, remove
from onward.checkpoint.manifest import MANIFEST_NAME, read_manifest
from onward.checkpoint.memory.file_transfer import Transfer, transfer_files
from onward.checkpoint.memory.nodes import Nodes
from onward.checkpoint.reading import checkpoint_name, list_checkpoints
from onward.checkpoint.writing import CheckpointWriter, explained
from onward.errors import StorageError
from onward.operating_system import sync_directory
from onward.parallel.messages import Json, broadcast_json
from onward.parallel.sharded_tensors import ShardedTensor
from onward.untrusted_files import read_text


def rank_of_file(name: str) -> int:
    """Which rank wrote a data file: `rank-00003.safetensors` -> 3."""
    return int(name.removeprefix("rank-").removesuffix(".safetensors"))


class MemoryWriter(CheckpointWriter):
    """Saves into a folder in the memory of every node; while a save is under way there are two checkpoints.

    Args:
        root: the folder of this rank's node, which `prepare_nodes` made.
        nodes: who shares it.
        group: the ranks that save together; None: this process alone.
    """

    def __init__(self, root: Path, nodes: Nodes, group: dist.ProcessGroup | None) -> None:
        self._nodes = nodes
        super().__init__(root, max_num_checkpoints=1, group=group)

    def _prepare(self) -> None:
        """`prepare_nodes` has done it."""

    def _write(
        self,
        number: int,
        tensors: Mapping[str, ShardedTensor],
        names: tuple[str, ...],
        record: Mapping[str, Json],
        rank_record: Mapping[str, Json] | None,
        best: int | None,
    ) -> None:
        from onward.checkpoint.collective_save import save_together
        from onward.checkpoint.storage import Publication

        started, final = time.perf_counter(), self.directory / checkpoint_name(number)
        temporary = self.directory / f"{TEMPORARY_PREFIX}{final.name}"

        def begin() -> None:
            discard(temporary)
            temporary.mkdir()

        publication = Publication(
            temporary=temporary,
            final=final,
            begin=lambda: number,
            complete=lambda: None,
            is_shared=False,
            named_by="checkpoint.memory_dir",
        )
        try:
            self._on_each_node(begin)
            save_together(tensors, names, publication, record, rank_record, self._group)
            self._copy_manifest(temporary)
            transfers = do_together(self._group, lambda: self._transfers(temporary))
            transfer_files(self._group, transfers, temporary)
            self._on_each_node(lambda: publish(temporary, final))
            self._on_each_node(lambda: self._remove_others(final))
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise explained(error, final, self._group) from None
        self.write_seconds = time.perf_counter() - started

    def _on_each_node(self, action: Callable[[], object]) -> None:
        """Calls `action` on one rank of each node, the others waiting."""

        def act() -> None:
            if self._nodes.is_first:
                try:
                    action()
                except OSError as error:
                    raise StorageError(
                        f"a checkpoint in memory could not be written: {error}. Free memory, set checkpoint.memory_dir "
                        "to another folder, or leave out checkpoint.memory_period_updates."
                    ) from error

        do_together(self._group, act)

    def _copy_manifest(self, folder: Path) -> None:
        """Rank 0 has written it; the other nodes get the same bytes."""
        if self._group is None:
            return
        path = folder / MANIFEST_NAME
        is_author = dist.get_rank(self._group) == 0
        text = broadcast_json(self._group, read_text(path) if is_author else None)

        def write() -> None:
            if not is_author:
                path.write_text(text, encoding="utf-8")
                sync_directory(folder)

        self._on_each_node(write)

    def _transfers(self, folder: Path) -> list[Transfer]:
        keepers = self._nodes.keepers
        return [
            Transfer(entry, rank, keepers[rank])
            for entry in read_manifest(folder).files
            if (rank := rank_of_file(entry.name)) in keepers
        ]

    def _remove_others(self, newest: Path) -> None:
        for path in list_checkpoints(self.directory):
            if path != newest:
                remove(path)

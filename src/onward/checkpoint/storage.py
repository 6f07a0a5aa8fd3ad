"""The storage plug-in that `torch.distributed.checkpoint` writes through: one safetensors file per worker, in the
layout that torch's `HuggingFaceStorageReader` reads wherever no worker holds a tensor in several shards.

torch's own `HuggingFaceStorageWriter` builds each file in memory first. That takes twice the checkpoint in extra memory
and holds the interpreter lock for as long, so that a save in the background stops the training alongside it; this one
streams from the tensors and hashes the bytes on their way."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from onward import __version__
from onward.checkpoint.disk import not_shared, storage_error
from onward.checkpoint.manifest import CheckpointManifest, FileEntry, TensorEntry, write_manifest
from onward.checkpoint.planning import numbered_keys
from onward.checkpoint.safetensors_format import NAMES_KEY, OFFSETS_KEY, SAFETENSORS_DTYPES
from onward.operating_system import sync_directory
from onward.parallel.messages import Json
from onward.parallel.sharded_tensors import dtype_name
from onward.retries import persistently

CHUNK_BYTES = 4 * 2**20
"""Bytes hashed and handed to the operating system at a time: large enough that the calls cost nothing, small enough
that the bytes are still in the processor's cache for the second of the two."""

_HEADER_ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class FilePlan:
    """What the coordinator tells a worker about its file.

    Attributes:
        name: of the file.
        numbered: the tensors whose keys are numbered, and what is before the number.
    """

    name: str
    numbered: Mapping[str, str]


@dataclass(kw_only=True)
class Publication:
    """What happens around the files of a checkpoint, on the coordinating worker alone.

    Attributes:
        temporary, final: where the files are written, and where they will be when the checkpoint is complete.
        begin: called before anything is written; gives the checkpoint's number in the order of saves.
        complete: called when files and manifest are on the disk.
        is_shared: the coordinating worker sees the files of all others.
        named_by: the field of RUN.yaml that names the place.
    """

    temporary: Path
    final: Path
    begin: Callable[[], int]
    complete: Callable[[], None]
    is_shared: bool = True
    named_by: str = "checkpoint.checkpoints_dir"


class SafetensorsStorageWriter(StorageWriter):
    """Writes one checkpoint into a new directory: a safetensors file for every worker, then the manifest.

    The coordinating worker gathers every file's length and SHA-256 through the results that
    `torch.distributed.checkpoint` collects anyway, and writes them into the manifest.

    Attributes:
        publication: where the files go, and what is done before and after.
        record, rank_record: go into the manifest, the latter of every rank that has one as `record["ranks"][rank]`.
    """

    def __init__(
        self, publication: Publication, record: Mapping[str, Json], rank_record: Mapping[str, Json] | None = None
    ) -> None:
        self.publication = publication
        self.record = record
        self.rank_record = rank_record
        self._sequence = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: an instance writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Readies the directory of checkpoints, on the coordinator."""
        if is_coordinator:
            with self._explained(0):
                self._sequence = persistently(self.publication.begin, f"preparing {self.publication.final}")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds this worker's own record, which so reaches the coordinator."""
        return replace(plan, storage_data=self.rank_record)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the directory and gives every worker the name of its file; called on the coordinator."""
        records = {str(rank): plan.storage_data for rank, plan in enumerate(plans) if plan.storage_data is not None}
        if records:
            self.record = {**self.record, "ranks": records}
        with self._explained(0):
            temporary = self.publication.temporary
            persistently(lambda: temporary.mkdir(exist_ok=True), f"making {temporary}")
        numbered = numbered_keys(plans)
        return [
            replace(plan, storage_data=FilePlan(f"rank-{rank:05d}.safetensors", numbered))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Streams this worker's tensors into its file.

        Raises:
            StorageError: the disk refused, or is not the one that the coordinator made the directory on.
        """
        future: Future[list[WriteResult]] = Future()
        results = []
        if plan.items:
            parts = [(item, _tensor_data(item)) for item in plan.items]
            parts.sort(key=_place_in_file)
            directory = self.publication.temporary
            if not directory.is_dir():
                raise not_shared(directory.parent, f"it does not see {directory.name}, which rank 0 made there")
            with self._explained(sum(_part_bytes(data) for _, data in parts)):
                entry = _write_file(directory / plan.storage_data.name, parts, plan.storage_data.numbered, planner)
            results = [WriteResult(item.index, _part_bytes(data), entry) for item, data in parts]
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the manifest and completes the checkpoint: called on the coordinator, after all files are on disk.

        Raises:
            StorageError: the disk refused, or a file that a worker wrote is not there.
        """
        files = {result.storage_data.name: result.storage_data for part in results for result in part}
        tensors = {}
        for name, tensor in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(tensor, TensorStorageMetadata)
            tensors[name] = TensorEntry(dtype_name(tensor.properties.dtype), tuple(tensor.size))
        versions = {"onward": __version__, "torch": str(torch.__version__)}
        ordered = tuple(files[name] for name in sorted(files))
        temporary = self.publication.temporary
        with self._explained(0):
            missing = [file.name for file in ordered if not (temporary / file.name).is_file()]
            if missing and self.publication.is_shared:
                raise not_shared(temporary.parent, f"rank 0 does not see {', '.join(missing)}, written by other ranks")
            manifest = CheckpointManifest(
                sequence=self._sequence, files=ordered, tensors=tensors, record=self.record, written_by=versions
            )
            persistently(lambda: write_manifest(temporary, manifest), f"writing the manifest of {temporary}")
            persistently(lambda: sync_directory(temporary), f"writing {temporary}")
            persistently(self.publication.complete, f"completing {self.publication.final}")

    @contextmanager
    def _explained(self, needed_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place, field = self.publication.final, self.publication.named_by
            raise storage_error(error, place, needed_bytes, "written", field) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


def _tensor_data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn!r} is not a tensor; what is not a tensor goes into the record")
    return item.tensor_data


def _place_in_file(part: tuple[WriteItem, TensorWriteData]) -> tuple[int, str, tuple[int, ...]]:
    """Wide types first, so that every tensor begins at a multiple of its element's size."""
    item, data = part
    return -data.properties.dtype.itemsize, item.index.fqn, tuple(data.chunk.offsets)


def _part_bytes(data: TensorWriteData) -> int:
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _write_file(
    path: Path, parts: list[tuple[WriteItem, TensorWriteData]], numbered: Mapping[str, str], planner: SavePlanner
) -> FileEntry:
    """Each attempt writes the entire file: after a failed fsync nobody knows which of its bytes are on the disk."""
    return persistently(lambda: _write_file_once(path, parts, numbered, planner), f"writing {path}")


def _write_file_once(
    path: Path, parts: list[tuple[WriteItem, TensorWriteData]], numbered: Mapping[str, str], planner: SavePlanner
) -> FileEntry:
    digest = hashlib.sha256()
    path.unlink(missing_ok=True)
    with open(path, "xb") as stream:
        size_bytes = _write_bytes(stream, memoryview(_header(parts, numbered)), digest)
        for item, data in parts:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            content = _content(tensor)
            if len(content) != _part_bytes(data):
                raise ValueError(f"{item.index.fqn!r} has {len(content)} bytes, the plan says {_part_bytes(data)}")
            size_bytes += _write_bytes(stream, content, digest)
        stream.flush()
        os.fsync(stream.fileno())
    return FileEntry(path.name, size_bytes, digest.hexdigest())


def _header(parts: list[tuple[WriteItem, TensorWriteData]], numbered: Mapping[str, str]) -> bytes:
    keys = _keys([item.index.fqn for item, _ in parts], numbered)
    offsets = {key: {"saved_offsets": list(data.chunk.offsets)} for key, (_, data) in zip(keys, parts, strict=True)}
    # The three keys under which DCP's HuggingFaceStorageReader finds where in the full tensor a shard belongs.
    metadata = {OFFSETS_KEY: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    named = {key: item.index.fqn for key, (item, _) in zip(keys, parts, strict=True) if key != item.index.fqn}
    if named:
        metadata[NAMES_KEY] = json.dumps(named)
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for key, (_, data) in zip(keys, parts, strict=True):
        begin, end = end, end + _part_bytes(data)
        entries[key] = {
            "dtype": SAFETENSORS_DTYPES[data.properties.dtype],
            "shape": list(data.chunk.sizes),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def _keys(names: list[str], numbered: Mapping[str, str]) -> list[str]:
    """A key for each shard: the tensor's name; `name#0`, `name#1` and so on where a worker holds several shards."""
    counts: Counter[str] = Counter()
    keys = []
    for name in names:
        keys.append(f"{numbered[name]}{counts[name]}" if name in numbered else name)
        counts[name] += 1
    return keys


def _content(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _write_bytes(stream: BinaryIO, content: memoryview, digest: Any) -> int:
    for chunk in _chunks(content):
        digest.update(chunk)
        stream.write(chunk)
    return len(content)


def _chunks(content: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(content), CHUNK_BYTES):
        yield content[begin : begin + CHUNK_BYTES]

"""The storage plug-in that `torch.distributed.checkpoint` writes through: one safetensors file per worker, in the
layout that torch's `HuggingFaceStorageReader` reads.

torch's own `HuggingFaceStorageWriter` builds each file in memory first. That takes twice the checkpoint in extra memory
and holds the interpreter lock for as long, so that a save in the background stops the training beside it; this one
streams from the tensors and hashes the bytes on their way."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from onward import __version__
from onward.checkpoint.manifest import FileEntry, Json, Manifest, TensorEntry, dtype_name, write_manifest

CHUNK_BYTES = 4 * 2**20
"""Bytes hashed and handed to the operating system at a time: large enough that the calls cost nothing, small enough
that the bytes are still in the processor's cache for the second of the two."""

_HEADER_ALIGNMENT_BYTES = 8

_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


def refuse_unstorable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for a name or dtype that a safetensors file cannot hold."""
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise ValueError("a tensor cannot be named '__metadata__': safetensors files use that name themselves")
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the tensor name {name!r} is not valid Unicode: {error}") from error
        if tensor.dtype not in _SAFETENSORS_DTYPES:
            raise ValueError(f"tensor {name!r} is of {tensor.dtype}, which a safetensors file cannot hold")


class SafetensorsStorageWriter(StorageWriter):
    """Writes one checkpoint into an empty directory: a safetensors file for every worker, then the manifest.

    The coordinating worker gathers every file's length and SHA-256 through the results that
    `torch.distributed.checkpoint` collects anyway, and writes them into the manifest.

    Attributes:
        directory: where the files go; made here.
        sequence, record: go into the manifest; see `Manifest`.
    """

    def __init__(self, directory: Path, sequence: int, record: Mapping[str, Json]) -> None:
        self.directory = directory
        self.sequence = sequence
        self.record = record

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: an instance writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: every worker writes alike; only the coordinator is asked to `finish`."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Gives every worker the name of its file."""
        return [
            SavePlan(plan.items, storage_data=f"rank-{rank:05d}.safetensors", planner_data=plan.planner_data)
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Streams this worker's tensors into its file. OSError goes through."""
        future: Future[list[WriteResult]] = Future()
        results = []
        if plan.items:
            parts = [(item, _tensor_data(item)) for item in plan.items]
            parts.sort(key=lambda part: (-part[1].properties.dtype.itemsize, part[0].index.fqn))
            entry = _write_file(self.directory / plan.storage_data, parts, planner)
            results = [WriteResult(item.index, _part_bytes(data), entry) for item, data in parts]
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the manifest: called on one worker, after all files are on disk."""
        files = {result.storage_data.name: result.storage_data for part in results for result in part}
        tensors = {}
        for name, tensor in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(tensor, TensorStorageMetadata)
            tensors[name] = TensorEntry(dtype_name(tensor.properties.dtype), tuple(tensor.size))
        versions = {"onward": __version__, "torch": str(torch.__version__)}
        ordered = tuple(files[name] for name in sorted(files))
        write_manifest(self.directory, Manifest(self.sequence, ordered, tensors, self.record, versions))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


def _tensor_data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn!r} is not a tensor; what is not a tensor goes into the record")
    return item.tensor_data


def _part_bytes(data: TensorWriteData) -> int:
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _write_file(path: Path, parts: list[tuple[WriteItem, TensorWriteData]], planner: SavePlanner) -> FileEntry:
    digest = hashlib.sha256()
    with open(path, "xb") as stream:
        size_bytes = _write_bytes(stream, memoryview(_header(parts)), digest)
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


def _header(parts: list[tuple[WriteItem, TensorWriteData]]) -> bytes:
    offsets = {item.index.fqn: {"saved_offsets": list(data.chunk.offsets)} for item, data in parts}
    if len(offsets) != len(parts):
        raise ValueError("one worker's file cannot hold two pieces of one tensor")
    # The three keys under which DCP's HuggingFaceStorageReader finds where in the whole tensor a piece belongs.
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for item, data in parts:
        begin, end = end, end + _part_bytes(data)
        entries[item.index.fqn] = {
            "dtype": _SAFETENSORS_DTYPES[data.properties.dtype],
            "shape": list(data.chunk.sizes),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _HEADER_ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


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


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes in hexadecimal. OSError goes through."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable. OSError goes through."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Where the shards of every tensor are stored in the files of a checkpoint, and reading any slice of them: only the
bytes that are needed, from whichever files hold them."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic
import torch
from typing_extensions import TypedDict

from onward.checkpoint.manifest import CheckpointManifest, Size
from onward.checkpoint.safetensors_format import NAMES_KEY, OFFSETS_KEY, SAFETENSORS_DTYPES
from onward.errors import CheckpointError
from onward.parallel.sharded_tensors import ShardedTensor, dtype_name
from onward.untrusted_files import first_problem, open_regular, parse_json, path_inside, validated

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}

LARGEST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as the format's own readers have it."""


class _Entry(TypedDict):
    dtype: str
    shape: list[Size]
    data_offsets: Annotated[list[Size], pydantic.Field(min_length=2, max_length=2)]


class _Offsets(TypedDict):
    saved_offsets: list[Size]


# numpy knows neither bfloat16 nor float8; bytes of that width do as well.
_CARRIERS: dict[int, np.dtype[Any]] = {1: np.dtype("i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


@dataclass(frozen=True, kw_only=True)
class StoredShard:
    """A tensor shard in a file.

    Attributes:
        file: the safetensors file.
        begin_bytes: where in the file its first element is.
        dtype: of its elements.
        offsets: where in the full tensor the shard begins.
        sizes: of the shard.
    """

    file: Path
    begin_bytes: int
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self, slices: tuple[slice, ...]) -> torch.Tensor:
        """A slice of the shard as a new tensor in main memory. OSError is not caught."""
        carrier = _CARRIERS[self.dtype.itemsize]
        if math.prod(self.sizes) == 0:
            return torch.empty(self.sizes, dtype=self.dtype)[slices]
        # Mapped again for every read, so that pages read before do not stay counted as this process's memory.
        with open_regular(self.file) as stream:
            mapped = np.memmap(stream, carrier, mode="r", offset=self.begin_bytes, shape=self.sizes)
        return torch.from_numpy(np.array(mapped[slices], order="C")).view(self.dtype)


@dataclass(frozen=True)
class StoredTensor:
    """A full tensor of a checkpoint that stays in its files until it is read.

    Attributes:
        name: in the checkpoint.
        dtype, shape: of the full tensor.
        shards: of it in the files.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]

    def read(self) -> torch.Tensor:
        """The tensor, new in main memory at every call.

        Raises:
            CheckpointError: a file cannot be read, or elements are missing.
        """
        try:
            if [shard.sizes for shard in self.shards] == [self.shape]:
                return self.shards[0].read(tuple(slice(None) for _ in self.shape))
            full = torch.empty(self.shape, dtype=self.dtype)
            fill(self.name, ShardedTensor.full(full), self.shards)
            return full
        except OSError as error:
            raise CheckpointError(f"{self.name!r} cannot be read from its checkpoint: {error}.") from error


def find_stored_shards(path: Path, manifest: CheckpointManifest) -> dict[str, tuple[StoredShard, ...]]:
    """For every tensor of the checkpoint at `path` the shards that its files hold, by the files' own headers.

    Raises:
        CheckpointError: a file cannot be read, or is not what the manifest says.
    """
    found: dict[str, dict[object, StoredShard]] = {name: {} for name in manifest.tensors}
    for entry in manifest.files:
        file = path / entry.name
        try:
            file = path_inside(path, entry.name)
            for name, shard in _shards_of_file(file):
                if dtype_name(shard.dtype) != manifest.tensors[name].dtype:
                    raise ValueError(f"{name!r} is of {shard.dtype} in it")
                found[name][shard.offsets, shard.sizes] = shard
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            reason = first_problem(error) if isinstance(error, pydantic.ValidationError) else repr(error)
            raise CheckpointError(
                f"{file} is not a file of the checkpoint whose manifest is next to it: {reason}. "
                "Name another checkpoint."
            ) from error
    return {name: tuple(shards.values()) for name, shards in found.items()}


def _shards_of_file(file: Path) -> Iterator[tuple[str, StoredShard]]:
    with open_regular(file) as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        if header_bytes > min(file_bytes - 8, LARGEST_HEADER_BYTES):
            raise ValueError(f"its header claims {header_bytes:,} bytes; the file has {file_bytes:,}")
        header = parse_json(stream.read(header_bytes))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = validated(dict[str, str], header.pop("__metadata__", {}))
    offsets = validated(dict[str, _Offsets], parse_json(metadata.get(OFFSETS_KEY, "{}")))
    names = validated(dict[str, str], parse_json(metadata.get(NAMES_KEY, "{}")))
    for key, entry in validated(dict[str, _Entry], header).items():
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        dtype, starts = _DTYPES[entry["dtype"]], tuple(offsets[key]["saved_offsets"])
        needed = math.prod(entry["shape"]) * dtype.itemsize
        if len(starts) != len(entry["shape"]) or end - begin != needed or end > file_bytes:
            raise ValueError(
                f"{key!r} {dtype} {entry['shape']} needs {needed:,} bytes; the header says bytes {begin:,} to {end:,} "
                f"of {file_bytes:,}"
            )
        yield (
            names.get(key, key),
            StoredShard(file=file, begin_bytes=begin, dtype=dtype, offsets=starts, sizes=tuple(entry["shape"])),
        )


def fill(name: str, sharded: ShardedTensor, stored: Sequence[StoredShard]) -> None:
    """Copies into a rank's sharded tensor, in place, what its shards need of a stored tensor.

    Raises:
        CheckpointError: some of its elements are in no file.
        OSError: a file cannot be read.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    chunks = [ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes)) for shard in stored]
    layout = TensorStorageMetadata(
        properties=TensorProperties(dtype=sharded.tensor.dtype), size=torch.Size(sharded.full_shape), chunks=chunks
    )
    shards = [ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes)) for shard in sharded.shards]
    items = create_read_items_for_chunk_list(name, layout, shards)
    read = sum(math.prod(item.lengths) for item in items)
    if read != sharded.num_elements:
        raise CheckpointError(
            f"of {name!r} {list(sharded.full_shape)} this rank needs {sharded.num_elements} elements; the files of the "
            f"checkpoint hold {read} of them. Name another checkpoint."
        )
    target = sharded.tensor.detach()
    for item in items:
        assert item.dest_index.index is not None
        assert item.storage_index.index is not None
        shard = sharded.shards[item.dest_index.index]
        into = target[shard.local_slices][_slices(item.dest_offsets, item.lengths)]
        into.copy_(stored[item.storage_index.index].read(_slices(item.storage_offsets, item.lengths)))


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))

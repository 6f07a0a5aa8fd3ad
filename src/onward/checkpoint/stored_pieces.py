"""Where the pieces of every tensor lie in the files of a checkpoint, and reading any part of them: only the bytes that
are asked for, from whatever files hold them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from onward.checkpoint.manifest import Manifest
from onward.checkpoint.storage import NAMES_KEY, OFFSETS_KEY, SAFETENSORS_DTYPES
from onward.errors import CheckpointError
from onward.parallel.pieces import Piece, dtype_name

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}

# numpy knows neither bfloat16 nor float8; bytes of that width do as well.
_CARRIERS: dict[int, np.dtype[Any]] = {1: np.dtype("i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor in a file.

    Attributes:
        file: the safetensors file.
        begin_bytes: where in the file its first element is.
        dtype: of its elements.
        offsets: where in the whole tensor the box begins.
        sizes: of the box.
    """

    file: Path
    begin_bytes: int
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self, slices: tuple[slice, ...]) -> torch.Tensor:
        """A part of the box as a new tensor in main memory. OSError goes through."""
        carrier = _CARRIERS[self.dtype.itemsize]
        if math.prod(self.sizes) == 0:
            return torch.empty(self.sizes, dtype=self.dtype)[slices]
        # Mapped anew for every read, so that pages read before do not stay counted as this process's memory.
        mapped = np.memmap(self.file, carrier, mode="r", offset=self.begin_bytes, shape=self.sizes)
        return torch.from_numpy(np.array(mapped[slices], order="C")).view(self.dtype)


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor of a checkpoint that stays in its files until it is read.

    Attributes:
        name: in the checkpoint.
        dtype, shape: of the whole tensor.
        pieces: its boxes in the files.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    def read(self) -> torch.Tensor:
        """The tensor, new in main memory at every call.

        Raises:
            CheckpointError: a file cannot be read, or elements are missing.
        """
        try:
            if [piece.sizes for piece in self.pieces] == [self.shape]:
                return self.pieces[0].read(tuple(slice(None) for _ in self.shape))
            whole = torch.empty(self.shape, dtype=self.dtype)
            fill(self.name, Piece.whole(whole), self.pieces)
            return whole
        except OSError as error:
            raise CheckpointError(f"{self.name!r} cannot be read from its checkpoint: {error}.") from error


def find_pieces(path: Path, manifest: Manifest) -> dict[str, tuple[StoredPiece, ...]]:
    """For every tensor of the checkpoint at `path` the boxes that its files hold, by the files' own headers.

    Raises:
        CheckpointError: a file cannot be read, or is not what the manifest says.
    """
    found: dict[str, dict[object, StoredPiece]] = {name: {} for name in manifest.tensors}
    for entry in manifest.files:
        file = path / entry.name
        try:
            for name, piece in _pieces_of_file(file):
                if dtype_name(piece.dtype) != manifest.tensors[name].dtype:
                    raise ValueError(f"{name!r} is of {piece.dtype} in it")
                found[name][piece.offsets, piece.sizes] = piece
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise CheckpointError(
                f"{file} is not a file of the checkpoint whose manifest lies beside it: {error!r}. "
                "Name another checkpoint."
            ) from error
    return {name: tuple(pieces.values()) for name, pieces in found.items()}


def _pieces_of_file(file: Path) -> Iterator[tuple[str, StoredPiece]]:
    with open(file, "rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(header_bytes))
    metadata = header.pop("__metadata__", {})
    offsets: Mapping[str, Any] = json.loads(metadata.get(OFFSETS_KEY, "{}"))
    names: Mapping[str, str] = json.loads(metadata.get(NAMES_KEY, "{}"))
    for key, entry in header.items():
        begin_bytes = 8 + header_bytes + entry["data_offsets"][0]
        starts = tuple(offsets[key]["saved_offsets"])
        yield (
            names.get(key, key),
            StoredPiece(file, begin_bytes, _DTYPES[entry["dtype"]], starts, tuple(entry["shape"])),
        )


def fill(name: str, piece: Piece, stored: Sequence[StoredPiece]) -> None:
    """Copies into a rank's piece, in place, what its boxes need of a stored tensor.

    Raises:
        CheckpointError: some of its elements are in no file.
        OSError: a file cannot be read.
    """
    chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in stored]
    layout = TensorStorageMetadata(
        properties=TensorProperties(dtype=piece.tensor.dtype), size=torch.Size(piece.whole_shape), chunks=chunks
    )
    boxes = [ChunkStorageMetadata(torch.Size(box.whole_offsets), torch.Size(box.sizes)) for box in piece.boxes]
    items = create_read_items_for_chunk_list(name, layout, boxes)
    read = sum(math.prod(item.lengths) for item in items)
    if read != piece.num_elements:
        raise CheckpointError(
            f"of {name!r} {list(piece.whole_shape)} this rank needs {piece.num_elements} elements; the files of the "
            f"checkpoint hold {read} of them. Name another checkpoint."
        )
    target = piece.tensor.detach()
    for item in items:
        assert item.dest_index.index is not None
        assert item.storage_index.index is not None
        box = piece.boxes[item.dest_index.index]
        into = target[box.local_slices][_slices(item.dest_offsets, item.lengths)]
        into.copy_(stored[item.storage_index.index].read(_slices(item.storage_offsets, item.lengths)))


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))

"""The manifest of a checkpoint: one JSON file that names every data file with its size and SHA-256, every tensor with
its dtype and shape, and the run's record. It is written last, carries its own checksum, and its presence is the mark of
a complete checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import pydantic
import torch
from typing_extensions import TypedDict

from onward.errors import CheckpointError
from onward.parallel.messages import Json
from onward.parallel.sharded_tensors import dtype_name
from onward.untrusted_files import RefusedFile, first_problem, parse_json, path_inside, read_text, validated

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "onward-checkpoint"
FORMAT_VERSION = 2
"""1: one worker's file held one shard of a tensor at most, and the record had no `ranks`. Both are read."""


@dataclass(frozen=True)
class FileEntry:
    """One data file: its name inside the checkpoint, its length and the SHA-256 of its bytes in hexadecimal."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its dtype by torch's name without `torch.` (`float32`, `bfloat16`) and its full shape."""

    dtype: str
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorEntry:
        """The entry that describes `tensor`."""
        return TensorEntry(dtype_name(tensor.dtype), tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """What a checkpoint holds.

    Attributes:
        sequence: 1 for the first checkpoint ever completed in its directory, then counting up; "latest" and "oldest"
            mean this number, so that a run which went back to an earlier checkpoint resumes from its own saves.
        files: the data files.
        tensors: name -> dtype and shape.
        record: the run's counters, cursor, loss scale and parameters.
        written_by: versions of onward and torch.
    """

    sequence: int
    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]
    record: Mapping[str, Json]
    written_by: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        """Bytes of the data files together."""
        return sum(file.size_bytes for file in self.files)


Size: TypeAlias = Annotated[int, pydantic.Field(strict=True, ge=0, lt=2**63)]


def _dtype_of_torch(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError("expected a dtype by torch's name, such as float32")
    return name


class _File(TypedDict):
    name: str
    bytes: Size
    sha256: Annotated[str, pydantic.Field(pattern="^[0-9a-f]{64}$")]


class _Tensor(TypedDict):
    dtype: Annotated[str, pydantic.AfterValidator(_dtype_of_torch)]
    shape: list[Size]


class _Content(TypedDict):
    """What a manifest may hold: whoever wrote it could compute its checksum, too."""

    sequence: Size
    files: list[_File]
    tensors: dict[str, _Tensor]
    record: dict[str, Any]
    written_by: dict[str, str]


def snapshot_record(record: Mapping[str, Json]) -> dict[str, Any]:
    """Copies a record so deeply that later changes to it are not seen, exactly as reading it back would give it.

    Raises:
        TypeError: a value that JSON cannot hold exactly, with the place where it stands. Non-finite floats can be held:
            they are written as Python's `json` writes them.
    """
    _refuse_non_json(record, "record")
    copy: dict[str, Any] = json.loads(json.dumps(record))
    return copy


def _refuse_non_json(value: object, place: str) -> None:
    if value is None or type(value) in (bool, int, float, str):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{place} has the key {key!r} of type {type(key).__name__}; expected a str")
            _refuse_non_json(item, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_non_json(item, f"{place}[{index}]")
    else:
        raise TypeError(f"{place} is a {type(value).__module__}.{type(value).__name__}; expected a plain JSON value")


def write_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    """Writes `manifest.json` into `directory` and makes it durable. OSError goes through."""
    content = {
        "sequence": manifest.sequence,
        "written_by": dict(manifest.written_by),
        "files": [{"name": f.name, "bytes": f.size_bytes, "sha256": f.sha256} for f in manifest.files],
        "tensors": {name: {"dtype": t.dtype, "shape": list(t.shape)} for name, t in manifest.tensors.items()},
        "record": manifest.record,
    }
    document = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "sha256": _digest(content),
        "content": content,
    }
    with open(directory / MANIFEST_NAME, "w", encoding="utf-8") as stream:
        json.dump(document, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(directory: Path) -> CheckpointManifest:
    """Reads and checks the manifest of the checkpoint in `directory`.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer onward wrote it.
    """
    path = directory / MANIFEST_NAME
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is not a complete checkpoint: it has no {MANIFEST_NAME}, which is written last. "
            "Name another checkpoint."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Name another checkpoint.") from error
    try:
        content = validated(_Content, _checked_content(path, text))
        files = tuple(FileEntry(f["name"], f["bytes"], f["sha256"]) for f in content["files"])
        for file in files:
            path_inside(directory, file.name)
    except (pydantic.ValidationError, RefusedFile) as error:
        found = first_problem(error) if isinstance(error, pydantic.ValidationError) else str(error)
        raise CheckpointError(
            f"{path} has the right checksum but not the fields of format version {FORMAT_VERSION}: {found} "
            "It was not written by onward. Name another checkpoint."
        ) from error
    return CheckpointManifest(
        sequence=content["sequence"],
        files=files,
        tensors={name: TensorEntry(t["dtype"], tuple(t["shape"])) for name, t in content["tensors"].items()},
        record=content["record"],
        written_by=content["written_by"],
    )


def _checked_content(path: Path, text: str) -> dict[str, Any]:
    try:
        document = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Expected JSON. Name another checkpoint.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT_NAME:
        raise CheckpointError(
            f"{path} is damaged or not of a checkpoint: expected format {FORMAT_NAME!r}, "
            f"found {document.get('format') if isinstance(document, dict) else type(document).__name__!r}. "
            "Name another checkpoint."
        )
    version = document.get("version")
    if type(version) is int and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} is of format version {version}; this onward reads up to version {FORMAT_VERSION}. "
            "Load it with the onward that wrote it, or a newer one."
        )
    content = document.get("content")
    found = _digest(content)
    if type(version) is not int or version < 1 or not isinstance(content, dict) or found != document.get("sha256"):
        raise CheckpointError(
            f"{path} is damaged: expected SHA-256 {document.get('sha256')} of its content, found {found} "
            f"(format version {version}). Name another checkpoint."
        )
    return content


def _digest(content: object) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()

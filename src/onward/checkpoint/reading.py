"""Finding, checking and loading checkpoints. A checkpoint is read whole or not at all: every file's checksum and every
tensor's name, shape and dtype are compared before the first value is changed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from onward.checkpoint.manifest import MANIFEST_NAME, Manifest, TensorEntry, read_manifest
from onward.checkpoint.storage import sha256_of
from onward.errors import CheckpointError

REPLACED_PREFIX = ".replaced-"
"""A checkpoint that is being replaced by a new save of the same number carries this before its name for a moment; where
the new one never came, it still counts."""

_NAME = re.compile(r"checkpoint-(\d{8,})")
_LISTED_DIFFERENCES = 20


def checkpoint_name(number: int) -> str:
    """`checkpoint-00000120` for the checkpoint after 120 weight updates."""
    return f"checkpoint-{number:08d}"


def checkpoint_number(path: Path) -> int:
    """The number of weight updates in a checkpoint's directory name.

    Raises:
        CheckpointError: the directory is not named like a checkpoint.
    """
    match = _NAME.fullmatch(path.name.removeprefix(REPLACED_PREFIX))
    if match is None:
        raise CheckpointError(f"{path} is not named like a checkpoint; expected a name like {checkpoint_name(120)}.")
    return int(match[1])


def list_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of a directory, oldest save first; empty where there are none or no directory.

    Complete means: the manifest, which is written last, is there. Those whose manifest is damaged come first.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    try:
        entries = sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"the checkpoints in {directory} cannot be listed: {error}.") from error
    found: dict[int, Path] = {}
    for path in entries:
        name = path.name.removeprefix(REPLACED_PREFIX)
        if _NAME.fullmatch(name) and (path / MANIFEST_NAME).is_file():
            number = checkpoint_number(path)
            if number not in found or path.name == name:
                found[number] = path
    return sorted(found.values(), key=lambda path: (sequence_of(path), checkpoint_number(path)))


def sequence_of(path: Path) -> int:
    """The how-manieth save of its directory the checkpoint at `path` is; 0 where its manifest is damaged."""
    try:
        return read_manifest(path).sequence
    except CheckpointError:
        return 0


def find_latest(directory: Path) -> Path | None:
    """The complete checkpoint that was saved last, or None where there is none.

    Its data are not verified here; `read_tensors` does that, and says so rather than falling back to an older one.

    Raises:
        CheckpointError: the latest one may be one whose manifest is damaged.
    """
    checkpoints = list_checkpoints(directory)
    if not checkpoints:
        return None
    latest = checkpoints[-1]
    for path in checkpoints:
        if sequence_of(path) == 0 and checkpoint_number(path) >= checkpoint_number(latest):
            read_manifest(path)
    return latest


def find_checkpoint(path: Path) -> Path:
    """What `checkpoint_to_load_path` means: `path` itself if it is a checkpoint, else the latest one inside it.

    Raises:
        CheckpointError: it is neither, with what was found there.
    """
    if (path / MANIFEST_NAME).is_file():
        return path
    latest = find_latest(path)
    if latest is not None:
        return latest
    expected = f"Expected a directory with a {MANIFEST_NAME}, or a directory of such directories named like "
    expected += f"{checkpoint_name(120)}. Name another path, or none to start from the model's own weights."
    if not path.exists():
        raise CheckpointError(f"the checkpoint {path} does not exist. {expected}")
    if not path.is_dir():
        raise CheckpointError(f"the checkpoint {path} is not a directory. {expected}")
    names = sorted(entry.name for entry in path.iterdir())
    holds = f"it holds {_shortened(names)}" if names else "it is empty"
    raise CheckpointError(f"there is no complete checkpoint in {path}: {holds}. {expected}")


def read_record(path: Path) -> dict[str, Any]:
    """The record of the checkpoint at `path`, as it was given to `CheckpointWriter.save`.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    return dict(read_manifest(path).record)


def verify(path: Path) -> Manifest:
    """Compares every file of the checkpoint at `path` with its length and SHA-256 in the manifest.

    Raises:
        CheckpointError: one that is missing, of another length or of other bytes, with both values; or a
            safetensors file that the manifest does not name.
    """
    manifest = read_manifest(path)
    for entry in manifest.files:
        file = path / entry.name
        try:
            size_bytes = file.stat().st_size
            if size_bytes != entry.size_bytes:
                raise _damaged(path, f"{file} has {size_bytes} bytes, expected {entry.size_bytes}")
            found = sha256_of(file)
        except FileNotFoundError:
            raise _damaged(path, f"{file} is missing, expected {entry.size_bytes} bytes") from None
        except OSError as error:
            raise _damaged(path, f"{file} cannot be read: {error}") from error
        if found != entry.sha256:
            raise _damaged(path, f"{file} has the SHA-256 {found}, expected {entry.sha256}")
    strangers = {file.name for file in path.glob("*.safetensors")} - {entry.name for entry in manifest.files}
    if strangers:
        raise _damaged(path, f"{path} holds files that its manifest does not name: {_shortened(sorted(strangers))}")
    return manifest


def _damaged(path: Path, finding: str) -> CheckpointError:
    others = [other.name for other in reversed(list_checkpoints(path.parent)) if other.name != path.name]
    advice = f"To load another one, of {_shortened(others)}, " if others else "There is no other one beside it; "
    return CheckpointError(
        f"the checkpoint {path} is damaged: {finding}. {advice}"
        + ("set checkpoint.checkpoint_to_load_path." if others else "restore it from a copy or start again.")
    )


def read_tensors(path: Path, into: Mapping[str, torch.Tensor], prefix: str = "") -> None:
    """Loads the tensors of the checkpoint at `path` in place, after `verify`.

    Args:
        path: a checkpoint's own directory.
        into: name -> tensor of the same shape and dtype, on any device; must be exactly the checkpoint's names.
        prefix: only tensors whose names begin with it are meant, in the checkpoint and in `into`.

    Raises:
        CheckpointError: the checkpoint is damaged, or it is one of another model: missing and extra names and
            differences in shape or dtype are listed, and nothing was changed.
    """
    manifest = verify(path)
    stored = {name: entry for name, entry in manifest.tensors.items() if name.startswith(prefix)}
    _refuse_differences(path, stored, {name: TensorEntry.of(tensor) for name, tensor in into.items()})
    if not into:
        return
    quiet_single_process_warning()
    try:
        load(dict(into), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    except CheckpointException as error:
        cause = first_failure(error)
        raise CheckpointError(f"the checkpoint {path} cannot be loaded: {cause}.") from cause


def read_new_tensors(path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Loads the tensors whose names begin with `prefix` into new tensors in main memory.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    entries = read_manifest(path).tensors
    tensors = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in entries.items()
        if name.startswith(prefix)
    }
    read_tensors(path, tensors, prefix)
    return tensors


def _refuse_differences(path: Path, stored: Mapping[str, TensorEntry], wanted: Mapping[str, TensorEntry]) -> None:
    only_stored = [f"{name} {stored[name]}" for name in stored if name not in wanted]
    only_wanted = [f"{name} {wanted[name]}" for name in wanted if name not in stored]
    differing = [
        f"{name} {stored[name]} in the checkpoint, {wanted[name]} in this run"
        for name in wanted
        if name in stored and stored[name] != wanted[name]
    ]
    kinds = [
        (differing, "of another shape or type"),
        (only_stored, "in the checkpoint only"),
        (only_wanted, "in this run only"),
    ]
    found = [f"{len(names)} {words}: {_shortened(names)}" for names, words in kinds if names]
    if found:
        raise CheckpointError(
            f"{path} is a checkpoint of another model, or of another optimizer. Of {len(stored)} tensors in the "
            f"checkpoint and {len(wanted)} in this run, {'; '.join(found)}. Load it with the model and optimizer it "
            "was saved with, or name another checkpoint."
        )


def _shortened(names: Iterable[str]) -> str:
    listed = list(names)
    text = ", ".join(listed[:_LISTED_DIFFERENCES])
    return text if len(listed) <= _LISTED_DIFFERENCES else f"{text} and {len(listed) - _LISTED_DIFFERENCES} more"


def first_failure(error: CheckpointException) -> BaseException:
    """What really went wrong on the first worker that failed; `CheckpointException` only wraps it."""
    return next(iter(error.failures.values()))[0]


def quiet_single_process_warning() -> None:
    """Silences the warning by which `torch.distributed.checkpoint` tells that it works in one process, as asked.

    A filter that stays, because `warnings.catch_warnings` is not safe beside other threads.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

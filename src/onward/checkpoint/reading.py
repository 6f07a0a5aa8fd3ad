"""Finding, checking and loading checkpoints. A checkpoint is read completely or not at all: every file's checksum and
every tensor's name, shape and dtype are compared before the first value is changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onward.checkpoint.agreement import do_together, gather_from_all, rank_and_size
from onward.checkpoint.disk import REPLACED_PREFIX
from onward.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, FileEntry, TensorEntry, read_manifest
from onward.checkpoint.stored_tensors import StoredTensor, fill, find_stored_shards
from onward.errors import CheckpointError, OtherTensorsError
from onward.parallel.sharded_tensors import ShardedTensor, dtype_name, dtype_named
from onward.retries import persistently
from onward.spelling import shortened
from onward.untrusted_files import path_inside, sha256_of

_NAME = re.compile(r"checkpoint-(\d{8,})")
_LISTED_DIFFERENCES = 4


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


def incomplete_checkpoints(directory: Path) -> list[Path]:
    """Folders named like a checkpoint without a manifest: parts of a copy or upload that was interrupted; by number."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted((path for path in found if not (path / MANIFEST_NAME).is_file()), key=checkpoint_number)


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
    newer = [
        one for one in incomplete_checkpoints(path) if latest and checkpoint_number(one) > checkpoint_number(latest)
    ]
    if newer:
        raise CheckpointError(
            f"{newer[-1]} is newer than {latest}, but incomplete: it has no {MANIFEST_NAME}. Restore it from a "
            f"copy, or name {latest} itself to use that one."
        )
    if latest is not None:
        return latest
    expected = f"Expected a directory with a {MANIFEST_NAME}, or a directory of such directories named like "
    expected += f"{checkpoint_name(120)}. Name another path; without any, training begins with the model's weights."
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


def note_on_taken(asked: Path, taken: Path) -> str:
    """Which checkpoint of a folder was taken, and which is of the best evaluation; "" where one was named.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    if asked == taken:
        return ""
    best = read_record(taken).get("callbacks", {}).get("BestEvaluation", {})
    kept = taken if best.get("value") is None else taken.with_name(checkpoint_name(best["update"]))
    if kept == taken or not kept.is_dir():
        return f"the checkpoint is {taken.name}, the latest in {asked}."
    return (
        f"the checkpoint is {taken.name}, the latest in {asked}. That of the best evaluation is {kept.name}: pass "
        f"--checkpoint {kept} to take it."
    )


def exported_kinds(record: Mapping[str, Any], weights: str | None = None) -> tuple[str, ...]:
    """Beginnings of the names of tensors that a trained model is written from; later ones replace earlier ones.

    Args:
        record: of the checkpoint.
        weights: "average" or "last"; None: as `averaging.export` of the run says.

    Raises:
        CheckpointError: the average is asked for, and the checkpoint holds none.
    """
    count = record.get("average") or 0
    if weights == "average" and not count:
        raise CheckpointError(
            "the checkpoint holds no average of the weights: the run had no averaging.kind, or had not reached "
            "averaging.start_update. Pass --weights last."
        )
    asked = weights or record.get("parameters", {}).get("averaging", {}).get("export", "average")
    return ("weights/", "states/", *(("average/",) if count and asked == "average" else ()))


def verify(path: Path, group: dist.ProcessGroup | None = None) -> CheckpointManifest:
    """Compares every file of the checkpoint at `path` with its length and SHA-256 in the manifest.

    Args:
        path: a checkpoint's own directory.
        group: ranks that share the work, each calling this; None: this process does all of it.

    Raises:
        CheckpointError: one that is missing, of another length or of other bytes, with both values; or a
            safetensors file that the manifest does not name. The same on every rank.
    """
    rank, size = rank_and_size(group)

    def check() -> CheckpointManifest:
        manifest = persistently(lambda: read_manifest(path), f"reading {path}")
        verify_files(path, manifest.files[rank::size])
        strangers = {file.name for file in path.glob("*.safetensors")} - {entry.name for entry in manifest.files}
        if strangers:
            raise _damaged(path, f"{path} holds files that its manifest does not name: {_shortened(sorted(strangers))}")
        return manifest

    return do_together(group, check)


def verify_files(path: Path, entries: Iterable[FileEntry]) -> None:
    """Compares files of the checkpoint at `path` with their entries in its manifest.

    Raises:
        CheckpointError: one is missing, or of another length or other bytes.
    """
    for entry in entries:
        file = path / entry.name
        try:
            # Looked at before it is opened: of a file outside of the checkpoint not even a checksum is shown.
            file = path_inside(path, entry.name)
            size_bytes = persistently(file.stat, f"reading {file}").st_size
            if size_bytes != entry.size_bytes:
                raise _damaged(path, f"{file} has {size_bytes} bytes, expected {entry.size_bytes}")
            found = persistently(lambda: sha256_of(file), f"reading {file}")  # noqa: B023 - called here
        except FileNotFoundError:
            raise _damaged(path, f"{file} is missing, expected {entry.size_bytes} bytes") from None
        except OSError as error:
            raise _damaged(path, f"{file} cannot be read: {error}") from error
        if found != entry.sha256:
            raise _damaged(path, f"{file} has the SHA-256 {found}, expected {entry.sha256}")


def _damaged(path: Path, finding: str) -> CheckpointError:
    others = [other.name for other in reversed(list_checkpoints(path.parent)) if other.name != path.name]
    advice = (
        f"There are others, {_shortened(others)}: set checkpoint.if_damaged to earlier to resume from the newest one "
        "that is not damaged, or name one in checkpoint.checkpoint_to_load_path."
        if others
        else "There is no other one in its folder: restore it from a copy, or set checkpoint.if_damaged to restart."
    )
    return CheckpointError(f"the checkpoint {path} is damaged: {finding}. {advice}")


def read_sharded_tensors(
    path: Path,
    into: Mapping[str, ShardedTensor],
    prefix: str = "",
    *,
    optional: tuple[str, ...] = (),
    group: dist.ProcessGroup | None = None,
) -> tuple[str, ...]:
    """Loads this rank's shards of the checkpoint at `path` in place, from whatever layout it was saved, after `verify`.

    Each rank reads only the bytes that its shards need. The full tensors' names, shapes and dtypes must be exactly
    the checkpoint's, those of all ranks combined, except that names beginning with one of `optional` may be
    lacking on either side.

    Args:
        path: a checkpoint's own directory.
        into: name -> this rank's sharded tensor, on any device.
        prefix: only tensors whose names begin with it are meant, in the checkpoint and in `into`.
        optional: beginnings of names that belong to a layout and not to the model: `random/`.
        group: the ranks that load together, each calling this; None: this process alone, with every name.

    Returns:
        The optional names of this rank's `into` that the checkpoint lacks; their values are as they were.

    Raises:
        CheckpointError: the checkpoint is damaged, or it is one of another model: missing and extra names and
            differences in shape or dtype are listed, and nothing was changed. The same on every rank.
    """
    return read_verified_tensors(path, verify(path, group), into, prefix, optional=optional, group=group)


def read_verified_tensors(
    path: Path,
    manifest: CheckpointManifest,
    into: Mapping[str, ShardedTensor],
    prefix: str = "",
    *,
    optional: tuple[str, ...] = (),
    group: dist.ProcessGroup | None = None,
) -> tuple[str, ...]:
    """`read_sharded_tensors` from the files that `manifest` names, which have been verified. Raises as it does."""
    stored = {name: entry for name, entry in manifest.tensors.items() if name.startswith(prefix)}
    own = {name: TensorEntry(dtype_name(sharded.tensor.dtype), sharded.full_shape) for name, sharded in into.items()}
    told = gather_from_all(group, {name: [entry.dtype, entry.shape] for name, entry in own.items()})
    wanted = {name: TensorEntry(dtype, tuple(shape)) for one in told for name, (dtype, shape) in one.items()}
    _refuse_differences(path, _expected(stored, wanted, optional), _expected(wanted, stored, optional))

    def read() -> None:
        places = persistently(lambda: find_stored_shards(path, manifest), f"reading {path}")
        for name, sharded in into.items():
            if name in stored:
                try:
                    fill(name, sharded, places[name])
                except OSError as error:
                    raise CheckpointError(f"the checkpoint {path} cannot be loaded: {error}.") from error

    do_together(group, read)
    return tuple(name for name in into if name not in stored)


def _expected(
    entries: Mapping[str, TensorEntry], others: Mapping[str, TensorEntry], optional: tuple[str, ...]
) -> dict[str, TensorEntry]:
    """What the other side must have: all but the optional names that it lacks."""
    return {name: entry for name, entry in entries.items() if name in others or not name.startswith(optional)}


def read_tensors(path: Path, into: Mapping[str, torch.Tensor], prefix: str = "") -> None:
    """`read_sharded_tensors` of full tensors into one process. Raises as it does."""
    read_sharded_tensors(path, {name: ShardedTensor.full(tensor) for name, tensor in into.items()}, prefix)


def open_tensors(path: Path, prefix: str = "") -> dict[str, StoredTensor]:
    """The full tensors whose names begin with `prefix`, saved from whatever layout, each read when it is asked for.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    manifest = verify(path)
    places = find_stored_shards(path, manifest)
    return {
        name: StoredTensor(name, dtype_named(entry.dtype), entry.shape, places[name])
        for name, entry in manifest.tensors.items()
        if name.startswith(prefix)
    }


def read_new_tensors(path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Loads the tensors whose names begin with `prefix` into new tensors in main memory.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    return {name: tensor.read() for name, tensor in open_tensors(path, prefix).items()}


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
        raise OtherTensorsError(
            str(path),
            f"Of {len(stored)} tensors in the checkpoint and {len(wanted)} in this run, {'; '.join(found)}.",
        )


def _shortened(names: Iterable[str]) -> str:
    return shortened(names, _LISTED_DIFFERENCES)

"""From which checkpoint of its folder a run resumes, and what happens where some of them are damaged: nothing is passed
over in silence, and no run starts over over damaged checkpoints unless it is asked to."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

from onward.checkpoint.disk import clear_leftovers, set_aside, storage_error
from onward.checkpoint.manifest import MANIFEST_NAME, read_manifest
from onward.checkpoint.reading import checkpoint_number, incomplete_checkpoints, list_checkpoints, sequence_of, verify
from onward.errors import CheckpointError

IfDamaged = Literal["refuse", "earlier", "restart"]

_RESTORE = "Restore it from a copy"


def choose_checkpoint(directory: Path, if_damaged: IfDamaged) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, and what to report; None: there is none. Damaged ones are renamed and kept.

    One rank calls this, which holds the lock of the folder.

    Args:
        directory: of the checkpoints.
        if_damaged: as `checkpoint.if_damaged`.

    Raises:
        CheckpointError: checkpoints are damaged, and `if_damaged` does not say to leave them out.
        StorageError: a damaged one cannot be renamed.
    """
    candidates, damaged = _by_manifest(directory)
    while if_damaged != "refuse" and candidates:
        # Data are verified here only where something is done about it; else when they are loaded.
        try:
            verify(candidates[-1])
            break
        except CheckpointError as error:
            damaged[candidates.pop()] = str(error).partition(". There ")[0]
    newest = checkpoint_number(candidates[-1]) if candidates else -1
    newer = {path: why for path, why in damaged.items() if checkpoint_number(path) > newest or not candidates}
    if newer:
        _refuse(newer, candidates, if_damaged)
    # The next save does this, too, but a run that is done saves nothing any more.
    with contextlib.suppress(OSError):
        clear_leftovers(directory)
    return (candidates[-1] if candidates else None), [_leave_out(path, why) for path, why in newer.items()]


def _by_manifest(directory: Path) -> tuple[list[Path], dict[Path, str]]:
    """Checkpoints whose manifest is there and undamaged, oldest save first; the others with what is wrong."""
    complete, damaged = [], {}
    for path in list_checkpoints(directory):
        if sequence_of(path):
            complete.append(path)
            continue
        try:
            read_manifest(path)
        except CheckpointError as error:
            damaged[path] = str(error).removesuffix(" Name another checkpoint.").rstrip(".")
    for path in incomplete_checkpoints(directory):
        damaged[path] = f"{path} is incomplete: it has no {MANIFEST_NAME}, which is written last"
    return complete, damaged


def _refuse(newer: dict[Path, str], candidates: list[Path], if_damaged: IfDamaged) -> None:
    is_cut_off = all(not (path / MANIFEST_NAME).is_file() for path in newer)
    if candidates and (if_damaged != "refuse" or is_cut_off):
        return
    if not candidates and if_damaged == "restart":
        return
    found = "; ".join(newer.values())
    if candidates:
        raise CheckpointError(
            f"{found}. {_RESTORE}, or set checkpoint.if_damaged to earlier to resume from {candidates[-1].name}."
        )
    raise CheckpointError(
        f"{found}. There is no undamaged checkpoint in {next(iter(newer)).parent}, and training would start over. "
        f"{_RESTORE}, set checkpoint.if_damaged to restart to start over, or set another checkpoint.checkpoints_dir."
    )


def _leave_out(path: Path, why: str) -> str:
    try:
        place = set_aside(path)
    except OSError as error:
        raise storage_error(error, path, 0, "renamed") from error
    return f"{why}. It is left out, and kept as {place.name}."

"""Changes of the disk, in an order that keeps complete checkpoints complete at every moment, and what it means when the
disk refuses one."""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from pathlib import Path

import torch.distributed as dist

from onward.checkpoint.agreement import do_together, gather_from_all, rank_and_size
from onward.errors import StorageError
from onward.operating_system import sync_directory
from onward.retries import persistently

TEMPORARY_PREFIX = ".tmp-onward-"
"""Names of what is being written or removed begin with this; the next writer, which holds the lock, removes them."""

REPLACED_PREFIX = ".replaced-"
"""A checkpoint that is being replaced by a new save of the same number carries this before its name for a moment; where
the new one never came, it still counts."""

DAMAGED_PREFIX = "damaged-"
"""Before the name of a checkpoint that was damaged and is kept for whoever wants to rescue something of it."""

CHECKPOINT = r"checkpoint-\d{8,}"
_LEFTOVER = re.compile(
    rf"{re.escape(TEMPORARY_PREFIX)}((removed-)?({re.escape(REPLACED_PREFIX)})?{CHECKPOINT}|shared-[0-9a-f]{{32}})"
)
_LEFTOVER_OF_OLD = re.compile(rf"\.tmp-(removed-)?({re.escape(REPLACED_PREFIX)})?{CHECKPOINT}")
_OWN_FILE = re.compile(r"rank-\d{5,}\.safetensors|manifest\.json")


def prepare_directory(directory: Path, group: dist.ProcessGroup | None) -> None:
    """Rank 0 makes the directory and clears away what a killed run left in it; the others see whether they share it.

    Raises:
        StorageError: it cannot be made or written to, or a rank does not see what rank 0 wrote there.
    """
    rank, _ = rank_and_size(group)
    mark = directory / f"{TEMPORARY_PREFIX}shared-{uuid.uuid4().hex}"

    def prepare() -> None:
        if rank == 0:
            try:
                make_directory(directory)
                clear_leftovers(directory)
                _end_replacements(directory)
                if group is not None:
                    mark.touch()
            except OSError as error:
                raise storage_error(error, directory, 0, "prepared for checkpoints") from error

    do_together(group, lambda: persistently(prepare, f"preparing {directory}"))
    marked = Path(gather_from_all(group, mark.name)[0])

    def look() -> None:
        if not (directory / marked.name).exists():
            raise not_shared(directory, f"it does not see {marked.name}, which rank 0 wrote there")

    if group is None:
        return
    try:
        do_together(group, look)
    finally:
        if rank == 0:
            mark.unlink(missing_ok=True)


def make_directory(path: Path) -> None:
    """Makes a directory and its parents durably. OSError goes through."""
    if not path.is_dir():
        if not path.parent.exists():
            make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def publish(temporary: Path, final: Path) -> None:
    """Gives a complete checkpoint its name. Between the two renames of a replacement the old one counts still."""
    replaced = final.parent / f"{REPLACED_PREFIX}{final.name}"
    if temporary.exists() or not final.exists():  # else an attempt before this one got so far
        if final.exists():
            if replaced.exists():
                remove(replaced)
            os.rename(final, replaced)
        os.rename(temporary, final)
    sync_directory(final.parent)
    if replaced.exists():
        remove(replaced)


def remove(path: Path) -> None:
    """Takes the name away first, so that a checkpoint half removed is never taken for one."""
    doomed = path.parent / f"{TEMPORARY_PREFIX}removed-{path.name}"
    discard(doomed)
    os.rename(path, doomed)
    sync_directory(path.parent)
    discard(doomed)


def discard(path: Path) -> None:
    """Removes a file or folder that counts for nothing. OSError goes through."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_leftovers(directory: Path) -> None:
    """Removes what killed processes were writing or removing; the caller holds the lock. OSError goes through."""
    for path in sorted(directory.iterdir()):
        if _is_leftover(path):
            discard(path)


def _end_replacements(directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        if re.fullmatch(re.escape(REPLACED_PREFIX) + CHECKPOINT, path.name):
            final = directory / path.name.removeprefix(REPLACED_PREFIX)
            if final.exists():
                remove(path)
            else:
                os.rename(path, final)
    sync_directory(directory)


def _is_leftover(path: Path) -> bool:
    """Whether onward wrote this and a killed process left it: by its name, of earlier versions also by its content."""
    if _LEFTOVER.fullmatch(path.name):
        return True
    if not _LEFTOVER_OF_OLD.fullmatch(path.name) or not path.is_dir() or path.is_symlink():
        return False
    return all(_OWN_FILE.fullmatch(file.name) for file in path.iterdir())


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that it neither counts nor is replaced; its new place. OSError goes through."""
    number = 0
    while (place := path.with_name(f"{DAMAGED_PREFIX}{path.name}{f'-{number}' if number else ''}")).exists():
        number += 1
    os.rename(path, place)
    sync_directory(path.parent)
    return place


_ADVICE = {
    errno.ENOSPC: "Free some space, or name another disk in {field}",
    errno.EDQUOT: "Your quota is used up: free some space, or name another disk in {field}",
    errno.EROFS: "The file system is mounted read-only: name another one in {field}",
    errno.EACCES: "Get write permission there, or name another directory in {field}",
    errno.EPERM: "Get write permission there, or name another directory in {field}",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or name another disk in {field}",
    errno.ENOTDIR: "Name a directory in {field}",
    errno.EEXIST: "Name a directory in {field}",
}


def storage_error(
    error: OSError, path: Path, needed_bytes: int, verb: str, field: str = "checkpoint.checkpoints_dir"
) -> StorageError:
    """What a refusal of the disk means: what could not be done, the bytes needed and free, and what to do.

    Args:
        error: what the operating system said.
        path: the checkpoint, or the directory of checkpoints.
        needed_bytes: of this rank; 0 where that is not the point.
        verb: what could not be done, "written".
        field: of RUN.yaml, that names the place.
    """
    where = f" ({error.filename})" if error.filename is not None else ""
    free = _free_bytes(path)
    sizes = f" {needed_bytes:,} bytes are needed" if needed_bytes else ""
    if free is not None:
        sizes += f"{',' if sizes else ''} {free:,} bytes are free on its file system"
    advice = _ADVICE.get(error.errno or 0, "Fix the disk, or name another one in {field}").format(field=field)
    return StorageError(
        f"{path} could not be {verb}: {error.strerror or error}{where}.{sizes}{'.' if sizes else ''} "
        f"{advice}. Checkpoints completed earlier are intact."
    )


def not_shared(directory: Path, finding: str) -> StorageError:
    """The error for ranks that see different disks under one path."""
    return StorageError(
        f"{directory} is not one directory for all ranks: {finding}. checkpoint.checkpoints_dir must be on a disk that "
        "all nodes share; name one there. Checkpoints completed earlier are intact."
    )


def _free_bytes(path: Path) -> int | None:
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None

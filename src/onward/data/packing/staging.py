"""Packed shards on their way to their folder: written next to it, moved there when all are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onward.data.manifest import MANIFEST_NAME
from onward.errors import StorageError
from onward.exclusive.lock import writing_to
from onward.exclusive.temporary import temporary_folder
from onward.operating_system import is_running

STAGING = ".packing-"


def shards_of(dest: Path) -> list[Path]:
    """What an earlier packing left in `dest`, the manifests included."""
    folders = [dest, dest / "train", dest / "test"]
    return sorted(
        entry
        for folder in folders
        if folder.is_dir()
        for entry in folder.iterdir()
        if (entry.suffix == ".pb" and not entry.name.startswith(".")) or entry.name == MANIFEST_NAME
    )


@contextmanager
def staging_folder(dest: Path) -> Iterator[Path]:
    """A hidden folder in `dest` for unfinished shards: no loader looks there, and renaming out of it is one step."""
    made = make_folders(dest)
    try:
        with writing_to([dest]):
            remove_abandoned(dest)
            with temporary_folder(dest / "packing") as staging:
                yield staging
    except OSError as error:
        raise StorageError(
            f"cannot pack into {str(dest)!r}: {error.strerror or error}. Nothing was left there; free space and pack "
            "again."
        ) from error
    finally:
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def make_folders(dest: Path) -> list[Path]:
    """Makes `dest`; returns what did not exist before, innermost first."""
    missing = [folder for folder in (dest, *dest.parents) if not folder.exists()]
    try:
        dest.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make the directory {str(dest)!r}: {error.strerror or error}.") from error
    return missing


def remove_abandoned(dest: Path) -> None:
    """Removes what a killed packing of an earlier version left; one that is still running is left alone."""
    for entry in dest.glob(f"{STAGING}*"):
        pid = entry.name.removeprefix(STAGING)
        if pid.isdigit() and not is_running(int(pid)):
            shutil.rmtree(entry, ignore_errors=True)


def publish(staging: Path, dest: Path) -> None:
    """Moves the finished files to `dest`, manifests first: a loader that comes in between finds shards missing."""
    for old in reversed(shards_of(dest)):
        old.unlink()
    for folder in ("train", "test"):
        if (dest / folder).is_dir() and not any((dest / folder).iterdir()):
            (dest / folder).rmdir()
    entries = sorted(path for path in staging.rglob("*") if path.is_file())
    for entry in sorted(entries, key=lambda path: path.name != MANIFEST_NAME):
        target = dest / entry.relative_to(staging)
        target.parent.mkdir(exist_ok=True)
        os.replace(entry, target)

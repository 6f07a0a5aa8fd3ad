"""Temporary files next to what they become, under names that hold the mark of the process that writes them.

A process that is killed cannot remove its own; the next one that writes into the same folder does. What carries no
mark, or that of a living process, is never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from onward.exclusive.process_mark import ProcessMark

ABANDONED_AFTER_SECONDS = 24 * 3600.0
"""What a process of another machine has not written to for that long is taken for abandoned."""

_NAME = re.compile(r"\..*\.onward-tmp-(?P<mark>[0-9a-z]+-\d+-\d+)-[0-9a-f]{8}", re.DOTALL)


def temporary_path(path: Path) -> Path:
    """A name next to `path` that nothing else has, hidden, with the mark of this process."""
    return path.with_name(f".{path.name[:120]}.onward-tmp-{ProcessMark.own()}-{secrets.token_hex(4)}")


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A folder next to `path` for what becomes it, removed at the end; what killed processes left there goes first.

    OSError goes through.
    """
    remove_abandoned(path.parent)
    folder = temporary_path(path)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file next to `path` that takes its place when it is complete; a failure leaves what was there.

    OSError goes through.
    """
    remove_abandoned(path.parent)
    unfinished = temporary_path(path)
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> list[Path]:
    """Removes temporary files and folders of processes that ended before they could; those removed."""
    removed = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and _is_abandoned(entry):
                path = Path(entry.path)
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(path)
                    else:
                        path.unlink()
                    removed.append(path)
    return removed


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    found = _NAME.fullmatch(entry.name)
    mark = None if found is None else ProcessMark.parse(found["mark"])
    if mark is None:
        return False
    is_alive = mark.is_alive
    if is_alive is not None:
        return not is_alive
    inside = [] if not entry.is_dir(follow_symlinks=False) else list(os.scandir(entry.path))
    newest = max(one.stat(follow_symlinks=False).st_mtime for one in [entry, *inside])
    return time.time() - newest > ABANDONED_AFTER_SECONDS

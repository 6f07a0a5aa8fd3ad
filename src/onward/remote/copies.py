"""Local copies of remote files, for what needs a file on this machine: models with their external data, checkpoints,
and what a command writes before it is uploaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onward.errors import ModelError, StorageError
from onward.onnx_files import external_locations, load_message
from onward.remote.files import download, is_file, list_folder, shown, upload, url_of
from onward.untrusted_files import path_inside

CACHE_VARIABLE = "ONWARD_CACHE"
"""Names the folder for local copies of remote files; else `onward` in XDG_CACHE_HOME or ~/.cache."""


def cache_folder() -> Path:
    """The folder for local copies of remote files."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onward"


def place_of(path: Path) -> Path:
    """Where on this machine the copy of a remote file or folder is: the same for every process of the machine."""
    digest = hashlib.sha256(shown(path.parent).encode()).hexdigest()[:16]
    return cache_folder() / "copies" / digest / path.name


def local_model(path: Path) -> Path:
    """The model file itself, or for a URL a fresh copy of it and of its external data.

    Raises:
        ModelError: it cannot be fetched.
    """
    if url_of(path) is None:
        return path
    copy = place_of(path)
    try:
        download(path, copy)
        for name in sorted(_external_files(copy)):
            download(path.parent / name, copy.parent / name)
    except OSError as error:
        raise ModelError(f"model {shown(path)!r} cannot be fetched: {error.strerror or error}.") from error
    return copy


def _external_files(path: Path) -> set[str]:
    """The files next to a model in which its tensors are stored; none for what is not an ONNX file."""
    try:
        locations = set(external_locations(load_message(path)))
        for location in locations:
            path_inside(path.parent, location)
    except Exception:  # whoever reads the model explains what is wrong with it
        return set()
    return locations


def local_folder(path: Path) -> Path:
    """The folder itself, or for a URL a fresh copy of it with all that is in it.

    Raises:
        StorageError: it cannot be fetched.
    """
    if url_of(path) is None:
        return path
    copy = place_of(path)
    shutil.rmtree(copy, ignore_errors=True)
    try:
        fetch_folder(path, copy)
    except OSError as error:
        raise StorageError(f"{shown(path)!r} cannot be fetched: {error.strerror or error}.") from error
    return copy


def fetch_folder(source: Path, target: Path) -> None:
    """Copies a remote folder, or a single file, with all that is in it. OSError goes through."""
    if is_file(source):
        download(source, target)
        return
    target.mkdir(parents=True, exist_ok=True)
    for entry in list_folder(source):
        if entry.is_file:
            download(source / entry.name, target / entry.name)
        else:
            fetch_folder(source / entry.name, target / entry.name)


@contextmanager
def uploaded(target: Path) -> Iterator[Path]:
    """A local path to write a file or folder to, which is uploaded at the end; a local `target` is given as it is.

    Raises:
        StorageError: it cannot be uploaded.
    """
    if url_of(target) is None:
        yield target
        return
    with tempfile.TemporaryDirectory(prefix="onward_") as folder:
        written = Path(folder) / target.name
        yield written
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                upload_file(path, target.parent / path.relative_to(folder))


def upload_file(source: Path, target: Path) -> None:
    """Uploads one file.

    Raises:
        StorageError: it cannot be written there, with what to do.
    """
    try:
        upload(source, target)
    except OSError as error:
        raise StorageError(
            f"{shown(target)!r} cannot be written: {error.strerror or error}. Check the URL and your permission "
            "to write there, or pass another one."
        ) from error

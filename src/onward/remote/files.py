"""Listing, reading, copying and removing files by path, whether the path is local or a URL that fsspec knows.

A URL travels as a `Path` (`Path("s3://bucket/a")` is `s3:/bucket/a`), so that fields and functions need no second type;
`url_of` gives the URL back. Whatever a remote file system raises becomes an `OSError` here.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast

from onward import untrusted_files

_URL = re.compile(r"([a-z][a-z0-9+.\-:]+):/+(.*)", re.DOTALL)
"""Of a path's text; one letter before the colon is a drive of Windows."""

_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
"""Protocol -> the package that fsspec needs for it."""


@dataclass(frozen=True)
class Entry:
    """One name in a folder."""

    name: str
    is_file: bool
    size_bytes: int


def url_of(path: str | os.PathLike[str]) -> str | None:
    """The URL that a path stands for; None for a local path."""
    text = os.fspath(path)
    found = _URL.fullmatch(text)
    if found is None:
        return None
    protocol, rest = found[1], found[2]
    return f"{protocol}:///{rest}" if protocol in ("file", "local") else f"{protocol}://{rest}"


def shown(path: str | os.PathLike[str]) -> str:
    """A path as its user wrote it."""
    return url_of(path) or os.fspath(path)


def list_folder(folder: Path) -> list[Entry]:
    """The names directly in a folder, sorted.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such folder.
        OSError: it cannot be listed.
    """
    url = url_of(folder)
    if url is None:
        return [
            Entry(one.name, one.is_file(), one.stat().st_size if one.is_file() else 0)
            for one in sorted(folder.iterdir(), key=lambda one: one.name)
        ]
    with _explained(url) as (system, root):
        system.invalidate_cache()
        found = system.ls(root, detail=True)
    if [_name(one) for one in found] == [Path(root).name] and found[0]["type"] == "file":
        raise NotADirectoryError(errno.ENOTDIR, "is a file", url)
    entries = [Entry(_name(one), one["type"] == "file", int(one.get("size") or 0)) for one in found]
    return sorted((one for one in entries if one.name), key=lambda one: one.name)


def is_folder(path: Path) -> bool:
    """Whether there is a folder; False for whatever cannot be looked at."""
    if url_of(path) is None:
        return path.is_dir()
    try:
        list_folder(path)
    except OSError:
        return False
    return True


def is_file(path: Path) -> bool:
    """Whether there is a file. OSError goes through for a file system that cannot be asked."""
    url = url_of(path)
    if url is None:
        return path.is_file()
    with _explained(url) as (system, root):
        return bool(system.isfile(root))


def read_text(path: Path) -> str:
    """A text file's content in UTF-8. OSError and UnicodeDecodeError go through."""
    url = url_of(path)
    if url is None:
        return untrusted_files.read_text(path)
    with _explained(url) as (system, root):
        content = cast(bytes, system.cat_file(root))
    return untrusted_files.decode(content)


@contextmanager
def open_binary(path: str | os.PathLike[str]) -> Iterator[FileIO]:
    """A file opened for reading, unbuffered; a remote one is copied to a temporary file first.

    Raises:
        OSError: it cannot be opened.
    """
    url = url_of(path)
    if url is None:
        with untrusted_files.open_regular(path, buffering=0) as file:
            yield cast(FileIO, file)
        return
    # A real file: those who read shards map it, seek in it and ask for its size.
    with tempfile.TemporaryDirectory(prefix="onward_") as folder:
        copy = Path(folder) / "copy"
        download(Path(path), copy)
        with untrusted_files.open_regular(copy, buffering=0) as file:
            yield cast(FileIO, file)


def download(source: Path, target: Path) -> None:
    """Copies a remote file here; `target` has its name only when it is complete. OSError goes through."""
    url = url_of(source)
    assert url is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with _explained(url) as (system, root):
            if not system.isfile(root):
                raise FileNotFoundError(errno.ENOENT, "does not exist", url)
            system.get_file(root, str(partial))
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def upload(source: Path, target: Path) -> None:
    """Copies a local file to a remote one, making its folder where there are folders. OSError goes through."""
    url = url_of(target)
    assert url is not None
    with _explained(url) as (system, root):
        system.makedirs(system._parent(root), exist_ok=True)
        system.put_file(str(source), root)


def remove(path: Path) -> None:
    """Removes a remote file, or a folder with all that is in it; nothing where there is none. OSError goes through."""
    url = url_of(path)
    assert url is not None
    with _explained(url) as (system, root):
        system.invalidate_cache()
        if system.exists(root):
            system.rm(root, recursive=True)


@contextmanager
def _explained(url: str) -> Iterator[tuple[Any, str]]:
    """The file system of a URL and the path in it; its errors as `OSError`s that name the URL and what to do."""
    import fsspec  # takes a tenth of a second, which commands without URLs need not spend

    protocol = url.partition("://")[0]
    try:
        system, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(protocol.rpartition("::")[2], "")
        remedy = f"pip install {package}" if package else str(error)
        raise OSError(errno.ENOPKG, f"{protocol}:// needs another package: {remedy}", url) from error
    except ValueError as error:
        known = "file, gs, https, memory, s3 and others"
        raise OSError(
            errno.EPROTONOSUPPORT, f"{protocol}:// is not a protocol that fsspec supports; expected {known}", url
        ) from error
    try:
        yield system, root
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "does not exist", url) from error
    except OSError as error:
        raise type(error)(error.errno or errno.EIO, error.strerror or str(error), url) from error
    except Exception as error:  # clients of object stores raise what they like
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error


def _name(listed: dict[str, Any]) -> str:
    return str(listed["name"]).rstrip("/").rpartition("/")[2]

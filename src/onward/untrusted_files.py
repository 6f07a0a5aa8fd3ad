"""Reading files that somebody else may have written: regular files only, of bounded size, and where the name comes from
another file, only inside of its folder. Every file that onward reads is opened here (`tests/test_architecture.py`)."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

LARGEST_TEXT_BYTES = 1 << 30
"""Of a text file that is read at once; the manifest of a checkpoint with a million tensors has a quarter of it."""

_SMALL_BYTES = 1 << 20

DEEPEST_JSON = 100
"""Lists and objects inside of each other."""


class RefusedFile(OSError):
    """A file that is not opened: not a regular one, too large, or named by another file and outside of its folder.

    An `OSError`, so that readers turn it into their own errors as they do with a disk's; `str` is the sentence alone.
    """

    def __init__(self, message: str) -> None:
        super().__init__(errno.EPERM, message)

    def __str__(self) -> str:
        return str(self.strerror)


def validated(kind: type[T], value: Any) -> T:
    """A value that a file or a user gave, as pydantic makes one of this type of it.

    Raises:
        ValidationError: it cannot; `first_problem` says why.
    """
    return cast("T", _adapter(cast("Any", kind)).validate_python(value))


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Built when it is first needed: it takes milliseconds, and few runs read all kinds of files."""
    return TypeAdapter(kind)


def path_inside(folder: str | os.PathLike[str], name: object) -> Path:
    """The path of a file that another file of `folder` names; links are followed before it is judged.

    Raises:
        RefusedFile: `name` is no file name, or leads out of the folder.
    """
    if not isinstance(name, str) or not name or any(ord(character) < 32 for character in name):
        raise RefusedFile(f"{_short(name)} is not the name of a file; expected text without control characters.")
    root = os.path.realpath(folder)
    # What cannot be encoded cannot be the name of a file either.
    if not _is_encodable(name) or len(os.fsencode(name)) > 4096:
        raise RefusedFile(f"{_short(name)} is not the name of a file on this system.")
    real = os.path.realpath(os.path.join(root, name))
    if os.path.isabs(name) or os.path.commonpath([root, real]) != root or real == root:
        raise RefusedFile(
            f"{_short(name)} is outside of the folder {os.fspath(folder)!r}; a file can only name files of its own "
            "folder: copy the file there."
        )
    return Path(folder) / name


def _is_encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def _short(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def open_regular(path: str | os.PathLike[str], largest_bytes: int | None = None, buffering: int = -1) -> BufferedReader:
    """Opens a regular file for reading; never waits for a pipe or a device.

    Args:
        path: the file; where another file names it, from `path_inside`.
        largest_bytes: a larger file is refused before anything of it is read; None: any size.
        buffering: as of `open`.

    Raises:
        RefusedFile: it is a folder, a pipe, a socket or a device, or too large.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedFile(f"{os.fspath(path)!r} is {_kind(status.st_mode)}; expected a regular file.")
        if largest_bytes is not None and status.st_size > largest_bytes:
            raise RefusedFile(
                f"{os.fspath(path)!r} has {status.st_size:,} bytes; at most {largest_bytes:,} are expected of it."
            )
        return cast(BufferedReader, open(descriptor, "rb", buffering=buffering))
    except BaseException:
        os.close(descriptor)
        raise


def _kind(mode: int) -> str:
    for is_kind, words in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe (FIFO)"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if is_kind(mode):
            return words
    return "no file"


def read_bytes(path: str | os.PathLike[str], largest_bytes: int = LARGEST_TEXT_BYTES) -> bytes:
    """The content of a regular file. Raises as `open_regular`."""
    with open_regular(path, largest_bytes) as file:
        # `read` allocates as much as it is asked for: not the bound, but what is there. /proc says 0 of its files.
        return file.read(min(largest_bytes, max(os.fstat(file.fileno()).st_size, _SMALL_BYTES)))


def read_text(path: str | os.PathLike[str], largest_bytes: int = LARGEST_TEXT_BYTES) -> str:
    """The content of a regular file in UTF-8, as `Path.read_text` gives it. Raises as it and `open_regular`."""
    return decode(read_bytes(path, largest_bytes))


def sha256_of(path: Path) -> str:
    """SHA-256 of a regular file's bytes in hexadecimal. Raises as `open_regular`."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def decode(content: bytes) -> str:
    """UTF-8, with the ends of lines that Python gives. UnicodeDecodeError goes through."""
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def parse_json(content: str | bytes) -> Any:
    """A JSON value.

    Raises:
        ValueError: it is not JSON, or nested more than `DEEPEST_JSON` deep.
    """
    deep = f"it is nested more than {DEEPEST_JSON} deep"
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(deep) from None
    level = [value]
    for _ in range(DEEPEST_JSON):
        level = [item for one in level for item in _items(one)]
        if not level:
            return value
    raise ValueError(deep)


def _items(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict | list)]


def first_problem(error: ValidationError) -> str:
    """One sentence on what a file holds instead of what it should: the place, the value, what was expected."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(_short(part) if isinstance(part, str) else str(part) for part in problem["loc"]) or "the file"
    return f"{place} is {_short(problem['input'])}: {problem['msg']}."

"""A file system that fails or stalls, as far as this process can see: faults where Python calls the system.

A fault belongs to an operation and to paths that hold a text; it happens a number of times, and then no more.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from onward.retries import Patience

OPERATIONS = ("open", "read", "write", "fsync", "rename", "replace", "mkdir")
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


@dataclass
class Fault:
    """What goes wrong, where, and how often still; how often it did."""

    operation: str
    match: str
    times: int
    number: int | None = None
    seconds: float = 0.0
    happened: int = 0

    def strike(self, operation: str, path: object) -> None:
        if operation != self.operation or self.match not in str(path) or self.happened >= self.times:
            return
        self.happened += 1
        time.sleep(self.seconds)
        if self.number is not None:
            raise OSError(self.number, os.strerror(self.number), str(path))


@dataclass
class FaultyStorage:
    """The faults of a test; every one that was asked for must happen, `faults` say how often each did."""

    faults: list[Fault] = field(default_factory=list)
    _paths: dict[int, str] = field(default_factory=dict)

    def fail(self, operation: str, number: int, times: int = 2, match: str = "") -> Fault:
        """The operation raises an OSError of this number the next so many times."""
        return self._add(Fault(operation, match, times, number=number))

    def stall(self, operation: str, seconds: float, match: str = "") -> Fault:
        """The operation takes so long the next time."""
        return self._add(Fault(operation, match, 1, seconds=seconds))

    def _add(self, fault: Fault) -> Fault:
        assert fault.operation in OPERATIONS
        self.faults.append(fault)
        return fault

    def strike(self, operation: str, path: object) -> None:
        for fault in self.faults:
            fault.strike(operation, path)

    def open(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        is_path = isinstance(file, str | os.PathLike)
        if is_path:
            self.strike("open", file)
        opened = _real_open(file, mode, *arguments, **options)
        path = str(file) if is_path else self._paths.get(file)
        if path is None:
            return opened
        self._paths[opened.fileno()] = path
        return _File(self, opened, path) if "b" in mode else opened

    def open_descriptor(self, path: Any, *arguments: Any, **options: Any) -> int:
        if not os.path.isdir(path):  # folders are opened to be synchronized or removed
            self.strike("open", path)
        descriptor: int = _real_os["open"](path, *arguments, **options)
        self._paths[descriptor] = str(path)
        return descriptor

    def fsync(self, descriptor: int) -> None:
        self.strike("fsync", self._paths.get(descriptor, "directory"))
        _real_os["fsync"](descriptor)


class _File:
    """A file whose reads and writes may fail."""

    def __init__(self, storage: FaultyStorage, opened: Any, path: str) -> None:
        self._storage, self._opened, self._path = storage, opened, path

    def __getattr__(self, name: str) -> Any:
        if name in ("read", "readinto", "readline"):
            self._storage.strike("read", self._path)
        if name in ("write", "writelines"):
            self._storage.strike("write", self._path)
        return getattr(self._opened, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._opened)


_real_open = builtins.open
_real_os = {name: getattr(os, name) for name in ("open", "fsync", "rename", "replace", "mkdir")}


@contextlib.contextmanager
def faulty_storage(monkeypatch: pytest.MonkeyPatch, patience: Patience | None = None) -> Iterator[FaultyStorage]:
    """Lets the test inject faults; retries are quick, and a stall is one after 50 ms."""
    storage = FaultyStorage()
    quick = patience or Patience(5.0, 0.001, 0.01, 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(Patience, "of_process", classmethod(lambda cls: quick))
        patched.setattr(builtins, "open", storage.open)
        patched.setattr(io, "open", storage.open)  # what pathlib calls
        patched.setattr(os, "open", storage.open_descriptor)
        patched.setattr(os, "fsync", storage.fsync)
        for name in ("rename", "replace", "mkdir"):

            def faulty(source: Any, *arguments: Any, name: str = name, **options: Any) -> Any:
                storage.strike(name, source)
                return _real_os[name](source, *arguments, **options)

            patched.setattr(os, name, faulty)
        yield storage

"""Locks on output folders and files: one process writes, a second one is refused and told who the first one is.

A lock is a file that names its holder. Whether the holder still lives is looked up where it can be (this machine), and
else found out by watching: a holder refreshes its lock every few seconds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from onward.deadline import Deadline
from onward.errors import FolderInUseError, StorageError
from onward.exclusive.lock_file import LockFile, lock_file
from onward.exclusive.process_mark import ProcessMark
from onward.exclusive.temporary import remove_abandoned
from onward.remote.files import shown, url_of
from onward.untrusted_files import parse_json

LOCK_NAME = ".onward-lock"
"""The lock of a folder, in it; the lock of a file is next to it and has its name, too."""

REFRESH_SECONDS = 20.0
"""Between two signs of life."""

ABANDONED_AFTER_SECONDS = 180.0
"""Without a sign of life for that long, a holder on another machine is taken for dead: several times what a network
file system may take to show a new time of a file."""

_ATTEMPTS = 20

_NOT_WRITABLE = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)
"""Nobody writes there, so there is nothing to lock; whoever tries says what is wrong, with the field that names it."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock.

    Attributes:
        host: name of its machine, for people.
        process: its process; empty where the file does not tell.
        since: when it took the lock, in UTC.
        command: what it runs.
        token: differs for every lock.
    """

    host: str
    process: str
    since: str
    command: str
    token: str

    @classmethod
    def own(cls, command: str) -> Holder:
        """This process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(
            host=socket.gethostname(),
            process=str(ProcessMark.own()),
            since=since,
            command=command,
            token=secrets.token_hex(8),
        )

    @classmethod
    def parse(cls, text: str) -> Holder:
        """The holder that a file names; one without a process for a file that is damaged or just being written."""
        try:
            found = parse_json(text)
            return cls(**{name: str(found[name]) for name in cls.__dataclass_fields__})
        except (ValueError, KeyError, TypeError):
            return cls(host="an unknown machine", process="", since="an unknown time", command="a process", token="")

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @property
    def is_alive(self) -> bool | None:
        """Whether it is another process that lives; None: that cannot be looked up from here."""
        mark = ProcessMark.parse(self.process)
        if mark is None:
            return None
        # A runner of this very process that was not ended, as in a notebook whose cell is run again, is replaced.
        return False if mark == ProcessMark.own() else mark.is_alive

    def __str__(self) -> str:
        mark = ProcessMark.parse(self.process)
        number = "" if mark is None else f", process {mark.pid}"
        return f"{self.command} on {self.host}{number}, since {self.since}"


class Lock:
    """A lock that this process holds until `release`, or until it ends.

    Args:
        file: of the lock.
        text: its content.
        target: what is locked, for messages.
    """

    def __init__(self, file: LockFile, text: str, target: Path) -> None:
        self.target = target
        self._file = file
        self._text = text
        self._stop = threading.Event()
        thread = threading.Thread(target=_keep_alive, args=(file, text, self._stop), name="onward-lock", daemon=True)
        thread.start()
        self._release = weakref.finalize(self, _release, file, text, self._stop, os.getpid())

    def check(self) -> None:
        """Looks whether the lock is still this process's: one that was stopped for long may have lost it.

        Raises:
            FolderInUseError: another process took it over.
        """
        with contextlib.suppress(OSError):  # where the file system fails, what is written next says so
            found = self._file.read()
            if found is not None and found != self._text:
                raise FolderInUseError(
                    f"{shown(self.target)} was taken over by {Holder.parse(found)}, because this process sent no "
                    "heartbeat for too long. Nothing more is written there. Start the run again when the other one "
                    "ended, or with another folder."
                )

    def release(self) -> None:
        """Lets others write."""
        self._release()


def _keep_alive(file: LockFile, text: str, stop: threading.Event) -> None:
    while not stop.wait(REFRESH_SECONDS):
        with contextlib.suppress(OSError):
            if file.read() == text:
                file.refresh(text)


def _release(file: LockFile, text: str, stop: threading.Event, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked process ends, not the holder
    stop.set()
    with contextlib.suppress(OSError):
        if file.read() == text:
            file.take_away(text)


class Locks:
    """Several locks, taken together or not at all."""

    def __init__(self, locks: Sequence[Lock] = ()) -> None:
        self._locks = list(locks)

    def check(self) -> None:
        """`Lock.check` of each."""
        for lock in self._locks:
            lock.check()

    def release(self) -> None:
        """Lets others write."""
        while self._locks:
            self._locks.pop().release()


def this_command() -> str:
    """What this process runs, as its user would recognize it."""
    program = Path(sys.argv[0] or "python").name if sys.argv else "python"
    text = " ".join([{"__main__.py": "onward", "-c": "python", "-m": "onward"}.get(program, program), *sys.argv[1:]])
    return text if len(text) <= 160 else f"{text[:157]}..."


def lock_outputs(
    folders: Iterable[Path], files: Iterable[Path] = (), notify: Callable[[str], None] | None = None
) -> Locks:
    """Locks output folders and files for this process, before anything is written there.

    Args:
        folders: made where they are missing; local paths or URLs.
        files: as above; a lock on a file says nothing of its folder.
        notify: called with a note on a wait that takes longer than a second.

    Raises:
        FolderInUseError: another process holds one of them; none is locked.
        StorageError: a lock file cannot be written.
    """
    places = {folder: folder / LOCK_NAME for folder in folders}
    places |= {file: file.with_name(f".{file.name}{LOCK_NAME}") for file in files}
    own, taken = Holder.own(this_command()), Locks()
    try:
        for target in sorted(places, key=str):  # in one order, so that two processes never wait for each other
            lock = _lock(target, places[target], own, notify or (lambda text: None))
            taken._locks += [] if lock is None else [lock]
    except BaseException:
        taken.release()
        raise
    return taken


@contextlib.contextmanager
def writing_to(folders: Iterable[Path] = (), files: Iterable[Path] = ()) -> Iterator[Locks]:
    """Holds locks. Raises as `lock_outputs`."""
    locks = lock_outputs(folders, files)
    try:
        yield locks
    finally:
        locks.release()


def _lock(target: Path, place: Path, own: Holder, notify: Callable[[str], None]) -> Lock | None:
    file, text = lock_file(place), own.to_text()
    if url_of(place) is None:
        remove_abandoned(place.parent)
    try:
        for _ in range(_ATTEMPTS):
            if file.create(text):
                return Lock(file, text, target)
            found = file.read()
            if found is None:
                continue
            holder = Holder.parse(found)
            if not _is_abandoned(file, holder, notify):
                raise FolderInUseError(
                    f"{shown(target)} is in use: {holder}, writes there. Nothing was changed. Wait until it ends, stop "
                    f"it, or set another folder or file. If it no longer exists, remove {file}."
                )
            file.take_away(found)
    except OSError as error:
        if error.errno in _NOT_WRITABLE:
            return None
        raise StorageError(
            f"{shown(target)} cannot be locked for this run: {error.strerror or error} ({file}). Check that the folder "
            "can be written to, or name another one."
        ) from error
    raise FolderInUseError(f"{shown(target)} is in use: several processes try to write there at once. Start one.")


def _is_abandoned(file: LockFile, holder: Holder, notify: Callable[[str], None]) -> bool:
    """Whether the holder is dead; on another machine it is watched until it shows a sign of life, or none for long."""
    if holder.is_alive is not None:
        return not holder.is_alive
    sign, is_announced = file.sign_of_life(), False
    deadline = Deadline(ABANDONED_AFTER_SECONDS - max(0.0, file.age_seconds() or 0.0))
    while sign is not None and not deadline.is_over:
        if file.sign_of_life() != sign:
            return False
        if not is_announced and deadline.waited_seconds > 1:
            notify(f"{file} names {holder}; watching for up to {deadline.seconds:.0f} s whether it is alive.")
            is_announced = True
        deadline.pause(0.5)
    return True

"""The file of a lock: made by one of several processes only, read, refreshed and removed; local, or behind a URL.

A local file appears with its content in one step, also on shared file systems. Object stores offer no such step: there
a lock is written and read back, which detects a second process unless both begin within the same moment.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Protocol

from onward.exclusive.temporary import temporary_path
from onward.remote.files import is_file, read_text, remove, shown, upload, url_of
from onward.untrusted_files import read_bytes


class LockFile(Protocol):
    """One lock file. OSError goes through everywhere."""

    def create(self, text: str) -> bool:
        """Makes it with this content; False: there is one already."""

    def read(self) -> str | None:
        """Its content; None: there is none."""

    def sign_of_life(self) -> object:
        """What is another value after every `refresh`; None: there is no file."""

    def age_seconds(self) -> float | None:
        """Seconds since it was refreshed last, by the clock that stamped it; None: that cannot be known."""

    def refresh(self, text: str) -> None:
        """Shows others that its holder is alive."""

    def take_away(self, text: str) -> None:
        """Removes it if it still has this content."""


class LocalLockFile:
    """A lock file on a local or shared file system. Folders that it makes and that stay empty are removed with it.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._made: list[Path] = []

    def __str__(self) -> str:
        return str(self.path)

    def create(self, text: str) -> bool:
        """See `LockFile`. A hard link is made in one step, on network file systems, too."""
        self._made += [folder for folder in self.path.parents if not folder.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._beside()
        try:
            draft.write_text(text, encoding="utf-8")
            try:
                os.link(draft, self.path)
            except FileExistsError:
                return False
            except OSError:
                return self._create_without_links(text)
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _create_without_links(self, text: str) -> bool:
        """For file systems without hard links; others may see the file empty for a moment."""
        try:
            with open(self.path, "x", encoding="utf-8") as stream:
                stream.write(text)
        except FileExistsError:
            return False
        return True

    def read(self) -> str | None:
        """See `LockFile`."""
        try:
            return read_bytes(self.path).decode("utf-8", "replace")
        except FileNotFoundError:
            return None

    def sign_of_life(self) -> object:
        """See `LockFile`: when the file was modified, by the clock of its file system."""
        try:
            return self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return None

    def age_seconds(self) -> float | None:
        """See `LockFile`: compared with a file made just now, so that the clocks of two machines may differ."""
        probe = self._beside()
        try:
            probe.touch()
            now = probe.stat().st_mtime
            return now - self.path.stat().st_mtime
        except FileNotFoundError:
            return None
        finally:
            probe.unlink(missing_ok=True)

    def refresh(self, text: str) -> None:
        """See `LockFile`. The time is the file system's."""
        os.utime(self.path)

    def take_away(self, text: str) -> None:
        """See `LockFile`. Another process may have replaced it meanwhile; then it is put back."""
        aside = self._beside()
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        try:
            if read_bytes(aside).decode("utf-8", "replace") != text:
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self.path)
        finally:
            aside.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the first that is not empty keeps those around it, too
            for folder in self._made:
                folder.rmdir()

    def _beside(self) -> Path:
        return temporary_path(self.path)


class RemoteLockFile:
    """A lock file behind a URL that fsspec knows.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return shown(self.path)

    def create(self, text: str) -> bool:
        """See `LockFile`. Of two processes that write at once, the last one finds its own content."""
        if is_file(self.path):
            return False
        self._write(text)
        return self.read() == text

    def read(self) -> str | None:
        """See `LockFile`."""
        try:
            return read_text(self.path).partition("\n")[0]
        except FileNotFoundError:
            return None

    def sign_of_life(self) -> object:
        """See `LockFile`: the content, which every `refresh` changes."""
        try:
            return read_text(self.path)
        except FileNotFoundError:
            return None

    def age_seconds(self) -> float | None:
        """See `LockFile`: object stores have no clock that one could ask."""
        return None

    def refresh(self, text: str) -> None:
        """See `LockFile`."""
        self._write(f"{text}\n{secrets.token_hex(8)}")

    def take_away(self, text: str) -> None:
        """See `LockFile`."""
        if self.read() == text:
            remove(self.path)

    def _write(self, text: str) -> None:
        with tempfile.TemporaryDirectory(prefix="onward_") as folder:
            copy = Path(folder) / "lock"
            copy.write_text(text, encoding="utf-8")
            upload(copy, self.path)


def lock_file(path: Path) -> LockFile:
    """The lock file at a path or URL."""
    return LocalLockFile(path) if url_of(path) is None else RemoteLockFile(path)

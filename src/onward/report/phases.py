"""What a command is doing while it has nothing to report yet: a phase that takes longer than a second is announced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from onward.report.formatting import format_duration

ANNOUNCED_AFTER_SECONDS = 1.0
"""A phase that is over sooner is not worth a line."""

REPEATED_AFTER_SECONDS = 30.0
"""How often a phase that continues is announced again."""


class Phases:
    """Announces phases that take long, from its own thread, since the phase may not return for minutes.

    As a context manager it ends the phase that lasts when the block is left.

    Args:
        notify: gets the announcements; may be replaced.
        announced_after_seconds, repeated_after_seconds: when.
    """

    def __init__(
        self,
        notify: Callable[[str], None],
        announced_after_seconds: float = ANNOUNCED_AFTER_SECONDS,
        repeated_after_seconds: float = REPEATED_AFTER_SECONDS,
    ) -> None:
        self.notify = notify
        self._first = announced_after_seconds
        self._repeat = repeated_after_seconds
        self._over: threading.Event | None = None
        self._announcing = threading.RLock()  # what is reported after a phase comes after its announcement

    @classmethod
    def silent(cls) -> Phases:
        """Phases that nobody is notified of."""
        return cls(_ignore)

    def begin(self, name: str | None) -> None:
        """A phase begins, such as "reading the model"; the one before is over. None: nothing worth a line begins."""
        self.end()
        if name is None or self.notify is _ignore:
            return
        over = self._over = threading.Event()
        threading.Thread(target=self._announce, args=(name, over), daemon=True, name="phase").start()

    def end(self) -> None:
        """The phase is over."""
        if self._over is not None:
            with self._announcing:
                self._over.set()
            self._over = None

    def __enter__(self) -> Phases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _announce(self, name: str, over: threading.Event) -> None:
        started, wait = time.monotonic(), self._first
        text = f"{name} ..."
        while not over.wait(wait):
            with self._announcing:
                if over.is_set():
                    return
                self.notify(text)
            wait = self._repeat
            text = f"still {name} ({format_duration(time.monotonic() - started + wait)} so far) ..."


def _ignore(text: str) -> None:
    """Tells nobody."""

"""Storage operations that are repeated: a file system that fails for a passing reason does not end a run.

What cannot pass by itself (a full disk, a missing right, a missing file) is reported at once; an operation that neither
succeeds nor fails is reported while it lasts.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from onward.deadline import Deadline
from onward.errors import OnwardError, chain_of

T = TypeVar("T")

RETRY_VARIABLE = "ONWARD_STORAGE_RETRY_SECONDS"
"""Environment variable: how long a failing storage operation is repeated; 0: not at all."""

_NAMES = (
    "EIO", "ESTALE", "ETIMEDOUT", "EAGAIN", "EBUSY", "EINTR", "EREMOTEIO", "ENOLINK", "ENOLCK", "EPROTO", "ECOMM",
    "ENETDOWN", "ENETUNREACH", "ENETRESET", "ECONNABORTED", "ECONNRESET", "ENOTCONN", "ESHUTDOWN", "EHOSTDOWN",
    "EHOSTUNREACH",
)  # fmt: skip
PASSING = frozenset(getattr(errno, name) for name in _NAMES if hasattr(errno, name))
"""Errors after which the same operation may succeed: what network file systems and devices report while a server
restarts, a lease is lost or a cable is out. Not among them: ENOSPC and EDQUOT (waiting frees nothing, and nothing of
the user's is removed to make room), EROFS, EACCES, EPERM, ENOENT, EFBIG, ENOTDIR, EEXIST, EISDIR."""

_LOGGER = logging.getLogger("onward.storage")


@dataclass(frozen=True)
class Patience:
    """How long a storage operation is repeated.

    Attributes:
        seconds: from its first failure to the last attempt.
        first_pause_seconds: before the second attempt; every further pause is twice as long.
        longest_pause_seconds: of the pauses.
        stall_seconds: an operation that takes longer is reported while it lasts.
    """

    seconds: float = 120.0
    first_pause_seconds: float = 0.1
    longest_pause_seconds: float = 10.0
    stall_seconds: float = 30.0

    @classmethod
    def of_process(cls) -> Patience:
        """The default, with the seconds that the environment sets."""
        try:
            return cls(seconds=float(os.environ[RETRY_VARIABLE]))
        except (KeyError, ValueError):
            return cls()


def persistently(action: Callable[[], T], what: str, patience: Patience | None = None) -> T:
    """Calls `action` until it succeeds, fails for a reason that does not pass, or has failed for too long.

    Retries and stalls are reported to the logger "onward.storage". The action must be repeatable: what an attempt that
    failed has left behind must not keep the next one from succeeding.

    Args:
        action: what is done; its OSErrors, or errors of onward's own that an OSError caused, are judged.
        what: the operation, for messages: "writing checkpoint-00000010".
        patience: how long; by default what the process sets.

    Raises:
        Exception: of the last attempt, with the number of attempts in its message where there were several.
    """
    patience = Patience.of_process() if patience is None else patience
    attempts, pause, deadline = 0, patience.first_pause_seconds, None
    while True:
        attempts += 1
        try:
            with reporting_stall(what, patience.stall_seconds):
                result = action()
        except (OSError, OnwardError) as error:
            deadline = deadline or Deadline(patience.seconds)
            left = deadline.left_seconds
            if not is_passing(error) or left <= 0:
                if attempts == 1:
                    raise
                raise _explained(error, attempts, deadline.waited_seconds) from error
            pause_seconds = min(pause, left)
            _LOGGER.warning(
                "%s failed (%s); attempt %d follows in %.1f s, for %.0f s more before it is given up.",
                what, _reason(error), attempts + 1, pause_seconds, left,
            )  # fmt: skip
            deadline.pause(pause_seconds)
            pause = min(2 * pause, patience.longest_pause_seconds)
        else:
            if attempts > 1:
                _LOGGER.warning("%s succeeded at attempt %d.", what, attempts)
            return result


def is_passing(error: BaseException) -> bool:
    """Whether an error, or the OSError that caused it, may pass by itself."""
    cause = next((one for one in chain_of(error, only_causes=True) if isinstance(one, OSError)), None)
    # Clients of object stores repeat by themselves what is worth it.
    return cause is not None and cause.errno in PASSING and "://" not in str(cause.filename)


@contextmanager
def reporting_stall(what: str, seconds: float) -> Iterator[None]:
    """Reports an operation that takes longer than this while it lasts, at growing distances, and then its end."""
    over, started = threading.Event(), time.monotonic()

    def watch() -> None:
        wait, waited = seconds, 0.0
        while not over.wait(wait):
            waited = max(waited + wait, time.monotonic() - started)
            _LOGGER.warning("%s has taken %.0f s and is not done: the file system does not answer.", what, waited)
            wait = waited

    thread = threading.Thread(target=watch, name="onward stall", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        waited = time.monotonic() - started
        if waited > seconds:
            _LOGGER.warning("%s ended after %.0f s.", what, waited)


def _explained(error: OSError | OnwardError, attempts: int, seconds: float) -> OSError | OnwardError:
    tried = f"tried {attempts} times in {seconds:.0f} s"
    if isinstance(error, OSError):
        return OSError(error.errno, f"{error.strerror} ({tried})", error.filename)
    return type(error)(f"{error} ({tried})")


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)

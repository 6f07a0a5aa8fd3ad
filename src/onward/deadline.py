"""A time to wait for something, in pauses: it is over when the clock says so, or when the pauses add up to it.

A clock that stands still (a virtual machine's, a debugger's, one in a test) then ends a wait as one that goes does.
"""

from __future__ import annotations

import time


class Deadline:
    """A wait that has begun now.

    Args:
        seconds: after which it is over.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()
        self._paused_seconds = 0.0

    def pause(self, seconds: float) -> None:
        """Sleeps."""
        time.sleep(seconds)
        self.count(seconds)

    def count(self, seconds: float) -> None:
        """A pause that was made in another way."""
        self._paused_seconds += seconds

    @property
    def waited_seconds(self) -> float:
        """Since it began."""
        return max(time.monotonic() - self._began, self._paused_seconds)

    @property
    def left_seconds(self) -> float:
        """Until it is over; below 0: since then."""
        return self.seconds - self.waited_seconds

    @property
    def is_over(self) -> bool:
        """Whether so much time has passed."""
        return self.left_seconds <= 0

"""Ctrl-C and SIGTERM, a request to stop, and SIGUSR1, one to save or stop: followed after the current update."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

SAVE_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR1", None)
"""Asks a run to save a checkpoint and to continue; Windows has none."""


class StopRequest:
    """While it is entered, the first SIGINT or SIGTERM is remembered; a second one ends the process as usual.

    Every SIGUSR1 is remembered until `take_save`; where it stops, it counts as the others.

    Args:
        save_signal_stops: whether SIGUSR1 stops the run.
        returns_on_sigint: whether SIGINT is to end the round and return, rather than to raise.

    Attributes:
        signal_name: of the signal that stops; None: none came.
        asked_at: when it came, on the monotonic clock.
    """

    def __init__(self, save_signal_stops: bool = False, returns_on_sigint: bool = False) -> None:
        self.signal_name: str | None = None
        self.asked_at = 0.0
        self._save_signal_stops = save_signal_stops
        self._returns_on_sigint = returns_on_sigint
        self._saves = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        # Python allows handlers in the main thread only; elsewhere the embedding program decides about signals.
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):
                self._previous[one] = signal.signal(one, self._remember)
            if SAVE_SIGNAL is not None:
                self._previous[SAVE_SIGNAL] = signal.signal(SAVE_SIGNAL, self._remember_save)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @property
    def returns(self) -> bool:
        """Whether a signal came on which the run returns."""
        return self._returns_on_sigint and self.signal_name == "SIGINT"

    def take_save(self) -> bool:
        """Whether SIGUSR1 came since the last call."""
        saves, self._saves = self._saves, False
        return saves

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_name, self.asked_at = signal.Signals(number).name, time.monotonic()
        self._restore(signal.SIGINT, signal.SIGTERM)

    def _remember_save(self, number: int, frame: FrameType | None) -> None:
        if not self._save_signal_stops:
            self._saves = True
        elif self.signal_name is None:  # Slurm may send it to a process several times: none of them ends it
            self.signal_name, self.asked_at = signal.Signals(number).name, time.monotonic()

    def _restore(self, *only: signal.Signals) -> None:
        for one in only or tuple(self._previous):
            if one in self._previous:
                signal.signal(one, self._previous.pop(one))  # type: ignore[arg-type]

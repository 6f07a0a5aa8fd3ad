"""Ctrl-C and SIGTERM: a wish to stop, which the loop follows after the current weight update."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """While it is entered, the first SIGINT or SIGTERM is remembered; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        # Python allows handlers in the main thread only; elsewhere the embedding program decides about signals.
        if threading.current_thread() is threading.main_thread():
            for one in (signal.SIGINT, signal.SIGTERM):
                self._previous[one] = signal.signal(one, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for one, handler in self._previous.items():
            signal.signal(one, handler)  # type: ignore[arg-type]
        self._previous.clear()

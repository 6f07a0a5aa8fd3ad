"""A file of TensorBoard events, written by a thread so that training does not wait for the disk.

TensorBoard's own writer prints the traceback of a failing disk or a removed folder from its thread; here it is kept for
whoever adds the next event.
"""

from __future__ import annotations

import errno
import itertools
import os
import queue
import socket
import threading
import time
from io import BytesIO
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from onward.retries import is_passing, persistently

QUEUED_EVENTS = 1_000
"""How many events may wait for the writing thread before training waits for it."""

LARGEST_KEPT_BYTES = 16 * 2**20
"""Events that are kept while the file system fails for a passing reason; with more, the file is given up."""


class EventFile:
    """Appends events to a new file in a directory, which is made if need be.

    Raises:
        OSError: the file cannot be written; also from every call after the thread has found out.
    """

    def __init__(self, log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.path = _make_file(log_dir)
        self._size_bytes, self._kept = 0, b""
        self._error: Exception | None = None
        self._queue: queue.Queue[Event | None] = queue.Queue(QUEUED_EVENTS)
        self._thread = threading.Thread(target=self._write_events, name="onward TensorBoard events", daemon=True)
        self._thread.start()
        self.add(Event(file_version="brain.Event:2"))
        self.flush()

    def add_summary(self, summary: Summary, update: int | None = None) -> None:
        """Adds a point of a chart, or a text."""
        self.add(Event(summary=summary, step=update))

    def add(self, event: Event) -> None:
        """Adds an event, with the time it is now."""
        event.wall_time = time.time()
        self._queue.put(event)
        self._raise_error()

    def flush(self) -> None:
        """Waits until all events are written, or kept where the file system fails for a passing reason."""
        self._queue.join()
        self._raise_error()

    def close(self) -> None:
        """Writes what is left, now with patience, and ends the thread."""
        self._queue.put(None)
        self._thread.join()
        if self._kept and self._error is None:
            persistently(self._append, f"writing {self.path}")
        self._raise_error()

    def _raise_error(self) -> None:
        if isinstance(self._error, OSError):  # a new one: each is raised with its own traceback
            raise OSError(self._error.errno, self._error.strerror, str(self.path))
        if self._error is not None:
            raise RuntimeError(f"writing {self.path} failed") from self._error

    def _write_events(self) -> None:
        is_open = True
        while is_open:
            taken = [self._queue.get()]
            while not self._queue.empty():
                taken.append(self._queue.get())
            is_open = None not in taken
            try:
                if self._error is None:
                    self._kept += b"".join(_framed(event) for event in taken if event is not None)
                    self._append()
            except Exception as error:  # a thread that ended would have training wait for ever
                if not is_passing(error) or len(self._kept) > LARGEST_KEPT_BYTES:
                    self._error = error
            for _ in taken:
                self._queue.task_done()

    def _append(self) -> None:
        """Writes what is kept after what is written, over what an attempt that failed has left there."""
        with open(self.path, "r+b", buffering=0) as file:  # a file that was removed is not created again
            file.seek(self._size_bytes)
            if file.write(self._kept) != len(self._kept):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._size_bytes, self._kept = self._size_bytes + len(self._kept), b""


def _make_file(log_dir: Path) -> Path:
    """An empty file with a name that TensorBoard looks for; by name, later ones come after earlier ones."""
    begin = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
    for number in itertools.count():
        path = log_dir / f"{begin}.{number}"
        try:
            path.open("xb").close()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


def _framed(event: Event) -> bytes:
    """An event with its length and checksums."""
    buffer = BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()

"""Work done ahead of its consumer, in order, on one background thread, within a bound on results alive at once."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from onward.data.batches import Batch
from onward.errors import OnwardError

Task = TypeVar("Task")
Result = TypeVar("Result")

_JOIN_SECONDS = 10.0

WORTH_A_THREAD_BYTES = 64 << 10
"""Batches of at least so many are assembled on a thread. Handing one over takes 25 us, and assembling 128 KiB took 250;
steps of 1 ms with batches of 16 KiB lost a tenth to a second thread of Python."""


class _End(NamedTuple):
    """What follows the last result."""

    error: BaseException | None


class _Shared(Generic[Task, Result]):
    """What consumer and thread share. The thread knows nothing else, so that an abandoned `Prefetch` can be freed.

    Attributes:
        ready: results that the consumer has not taken.
        room: holds an entry for each further result that may be alive.
    """

    def __init__(self, tasks: Iterator[Task], load: Callable[[Task], Result | None], capacity: int) -> None:
        self.ready: SimpleQueue[Result | _End] = SimpleQueue()
        self.room: SimpleQueue[None] = SimpleQueue()
        for _ in range(capacity):
            self.room.put(None)
        self.stopped = False
        self.thread = threading.Thread(target=_work, args=(self, tasks, load), name="onward-prefetch", daemon=True)

    def stop(self) -> None:
        self.stopped = True
        self.drop_ready()
        self.ready.put(_End(None))  # for a consumer that waits
        self.room.put(None)  # for the thread

    def drop_ready(self) -> None:
        """Frees results that nobody will take."""
        with contextlib.suppress(Empty):
            while True:
                self.ready.get_nowait()

    def close(self) -> None:
        """Stops the thread and waits until it has ended, `_JOIN_SECONDS` at most."""
        self.stop()
        # The first condition also spares what is gone already when an interpreter ends.
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(_JOIN_SECONDS)


class Prefetch(Generic[Task, Result]):
    """Iterates over `load(task)` for each task, in order; results that are None are left out.

    At most `capacity` results are alive at once: the one the consumer got last, those ready, and the one being loaded.
    The consumer must drop a result before it asks for the next.
    """

    def __init__(self, tasks: Iterator[Task], load: Callable[[Task], Result | None], capacity: int) -> None:
        self._shared: _Shared[Task, Result] = _Shared(tasks, load, capacity)
        self._holds_result = False
        self._end: _End | None = None
        weakref.finalize(self, self._shared.stop).atexit = False
        # A thread that copies arrays while the interpreter is torn down would crash it.
        atexit.register(self._shared.close)
        self._shared.thread.start()

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        """Gives the last result back and waits for the next.

        Raises:
            Exception: whatever a task or its loading raised, after the results before it.
            OnwardError: `stop` was called.
        """
        shared = self._shared
        if self._holds_result:
            shared.room.put(None)
            self._holds_result = False
        if self._end is None and not shared.stopped:
            found = shared.ready.get()
            if isinstance(found, _End):
                self._end = found
            elif not shared.stopped:
                self._holds_result = True
                return found
        if self._end is not None and self._end.error is not None:
            raise self._end.error
        if shared.stopped:
            raise OnwardError("the data loader was closed while its batches were still being read.")
        raise StopIteration

    def stop(self) -> None:
        """Tells the thread to stop after what it is loading, without waiting for it."""
        self._shared.stop()

    def close(self) -> None:
        """Stops the thread and waits until it has ended, `_JOIN_SECONDS` at most."""
        self._shared.close()


def _work(shared: _Shared[Task, Result], tasks: Iterator[Task], load: Callable[[Task], Result | None]) -> None:
    error = None
    try:
        shared.room.get()
        while not shared.stopped:
            try:
                task = next(tasks)
            except StopIteration:
                break
            result = load(task)
            del task
            if result is not None:
                shared.ready.put(result)
                del result
                shared.room.get()
    except BaseException as raised:
        error = raised
    finally:
        if shared.stopped:  # what it put there after `stop` had emptied it
            shared.drop_ready()
        shared.ready.put(_End(error))
        atexit.unregister(shared.close)


def run_ahead(batches: Iterator[Batch], opened: weakref.WeakSet[Prefetch[Any, Any]]) -> Iterator[Batch]:
    """Assembles large batches one ahead, on a background thread, while the consumer works.

    Args:
        batches: in their order.
        opened: the loader's open prefetches, to which this one is added.
    """
    first = next(batches, None)
    if first is None or sum(array.nbytes for array in first.features.values()) < WORTH_A_THREAD_BYTES:
        if first is not None:
            yield first
        yield from batches
        return
    prefetch: Prefetch[Batch, Batch] = Prefetch(batches, _pass_on, capacity=2)
    opened.add(prefetch)
    try:
        yield first
        del first
        yield from prefetch
    finally:
        prefetch.stop()


def _pass_on(batch: Batch) -> Batch:
    return batch

"""Work done ahead of its consumer, in order, on one background thread, within a bound on results alive at once."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from onward.data.batches import Batch
from onward.errors import OnwardError

Task = TypeVar("Task")
Result = TypeVar("Result")

_JOIN_SECONDS = 10.0

WORTH_A_THREAD_BYTES = 1 << 20
"""Batches of at least so many are assembled on a thread; handing smaller ones over takes longer than copying them."""


class _Shared(Generic[Task, Result]):
    """What consumer and thread share. The thread knows nothing else, so that an abandoned `Prefetch` can be freed."""

    def __init__(self, tasks: Iterator[Task], load: Callable[[Task], Result | None], capacity: int) -> None:
        self.changed = threading.Condition()
        self.ready: deque[Result] = deque()
        self.capacity = capacity
        self.held = 0
        self.error: BaseException | None = None
        self.finished = False
        self.stopped = False
        self.thread = threading.Thread(target=_work, args=(self, tasks, load), name="onward-prefetch", daemon=True)

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.ready.clear()
            self.changed.notify_all()

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
        with shared.changed:
            shared.held = 0
            shared.changed.notify_all()
            while not (shared.ready or shared.error or shared.finished or shared.stopped):
                shared.changed.wait()
            if shared.ready:
                shared.held = 1
                return shared.ready.popleft()
            if shared.error is not None:
                raise shared.error
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
    try:
        while _wait_for_room(shared):
            try:
                task = next(tasks)
            except StopIteration:
                break
            result = load(task)
            del task
            if result is None:
                continue
            with shared.changed:
                if not shared.stopped:
                    shared.ready.append(result)
                    shared.changed.notify_all()
            del result
    except BaseException as error:
        with shared.changed:
            shared.error = error
    finally:
        with shared.changed:
            shared.finished = True
            shared.changed.notify_all()
        atexit.unregister(shared.close)


def _wait_for_room(shared: _Shared[Task, Result]) -> bool:
    with shared.changed:
        while not shared.stopped and shared.held + len(shared.ready) >= shared.capacity:
            shared.changed.wait()
        return not shared.stopped


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

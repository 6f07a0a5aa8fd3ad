import gc
import threading
import time
import weakref

import pytest

from onward.data.prefetch import Prefetch
from onward.errors import OnwardError


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def test_results_come_in_order_without_those_that_are_none():
    results = Prefetch(iter(range(20)), lambda task: None if task % 3 == 0 else task * 10, 3)
    assert list(results) == [task * 10 for task in range(20) if task % 3]


def test_an_error_comes_after_the_results_before_it():
    def load(task):
        if task == 3:
            raise ValueError("three")
        return task + 1

    results = Prefetch(iter(range(9)), load, 2)
    assert [next(results), next(results), next(results)] == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(ValueError, match="three"):
            next(results)


def test_an_error_of_the_tasks_comes_through():
    def tasks():
        yield 1
        raise OSError("gone")

    results = Prefetch(tasks(), lambda task: task, 2)
    assert next(results) == 1
    with pytest.raises(OSError, match="gone"):
        next(results)


def test_work_stays_within_the_capacity():
    loaded = []
    results = Prefetch(iter(range(100)), lambda task: loaded.append(task) or task + 1, 3)
    assert wait_until(lambda: len(loaded) == 3)
    time.sleep(0.02)
    assert len(loaded) == 3
    next(results)
    time.sleep(0.02)
    assert len(loaded) == 3  # one is held by the consumer, two are ready
    next(results)
    assert wait_until(lambda: len(loaded) == 4)
    results.close()


def test_closing_wakes_a_waiting_consumer():
    release = threading.Event()
    results = Prefetch(iter(range(3)), lambda task: release.wait(60), 1)
    errors = []

    def consume():
        try:
            next(results)
        except OnwardError as error:
            errors.append(str(error))

    consumer = threading.Thread(target=consume)
    consumer.start()
    time.sleep(0.02)
    results.stop()
    consumer.join(60)
    release.set()
    assert errors == ["the data loader was closed while its batches were still being read."]
    results.close()


def test_a_forgotten_prefetch_ends_its_thread_and_frees_its_results():
    class Result:
        pass

    alive = weakref.WeakSet()

    def load(_):
        result = Result()
        alive.add(result)
        return result

    results = Prefetch(iter(range(9)), load, 3)
    thread = results._shared.thread
    assert wait_until(lambda: len(alive) == 3)
    del results
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert not alive

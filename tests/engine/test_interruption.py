"""The first signal is a wish, the second one an order, and outside nothing is changed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from onward.engine.interruption import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_remembered_and_the_second_does_what_it_did_before(number: signal.Signals) -> None:
    ended: list[int] = []
    before = signal.signal(number, lambda received, _: ended.append(received))
    try:
        with StopRequest() as stop:
            assert stop.signal_name is None
            os.kill(os.getpid(), number)
            assert stop.signal_name == number.name
            assert ended == []
            os.kill(os.getpid(), number)
            assert ended == [number]
    finally:
        signal.signal(number, before)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with contextlib.suppress(ValueError), StopRequest():
        assert signal.getsignal(signal.SIGINT) is not before[0]
        raise ValueError("inside")
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_in_another_thread_signals_belong_to_the_program_around() -> None:
    found: list[object] = []

    def enter() -> None:
        with StopRequest() as stop:
            found.extend((stop.signal_name, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [None, signal.getsignal(signal.SIGTERM)]

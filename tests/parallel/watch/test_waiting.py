"""How long is waited for collectives in a stretch that is measured."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from onward.parallel.watch import waiting
from onward.parallel.watch.waiting import WaitClock


class SlowWork:
    """Work of a collective that takes a moment."""

    def pause(self) -> None:
        time.sleep(0.02)


def test_waiting_is_no_own_work(monkeypatch: Any) -> None:
    monkeypatch.setattr(dist.Work, "wait", lambda work, *_: work.pause())
    before = dist.Work.wait
    clock = WaitClock(torch.device("cpu"), [])
    with clock.measuring():
        time.sleep(0.01)
        dist.Work.wait(SlowWork())  # type: ignore[arg-type]
    assert dist.Work.wait is before
    own, waited = clock.take_seconds()
    assert waited >= 0.02
    assert own >= 0.01
    assert clock.take_seconds() == (0.0, 0.0)


def test_other_threads_do_not_count_and_failures_leave_torch_as_it_was(monkeypatch: Any) -> None:
    monkeypatch.setattr(dist.Work, "wait", lambda work, *_: work.pause())
    before = dist.Work.wait
    clock = WaitClock(torch.device("cpu"), [])
    try:
        with clock.measuring():
            thread = threading.Thread(target=lambda: dist.Work.wait(SlowWork()))  # type: ignore[arg-type]
            thread.start()
            thread.join()
            raise KeyError
    except KeyError:
        pass
    assert dist.Work.wait is before
    assert clock.take_seconds()[1] == 0.0


def test_tensors_wherever_they_are_in_an_output() -> None:
    a, b, c = (torch.zeros(1) for _ in range(3))
    assert [id(one) for one in waiting._tensors_of({"x": [a, (b, None)], "y": 3, "z": c})] == [id(a), id(b), id(c)]

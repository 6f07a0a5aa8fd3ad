"""What callbacks and signals ask, agreed upon: at once in one process, and skipped batches with an end."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from onward.engine.callbacks import Control
from onward.engine.steering import Decision, Steering
from onward.errors import DataError
from onward.optim.schedules import RateAdjustment
from onward.parallel.launch.process import in_world_of_one


def steering() -> Steering:
    state: Any = SimpleNamespace(mesh=in_world_of_one(), counters=SimpleNamespace(ended_early_of=0))
    absent: Any = None
    return Steering(state, Control(absent, absent, RateAdjustment()))


def test_decisions_add_up() -> None:
    assert Decision(saves=True) | Decision(is_stopped=True) == Decision(is_stopped=True, saves=True)
    assert Decision() | Decision() == Decision()


def test_what_is_asked_is_heard_at_once() -> None:
    one = steering()
    assert one.after_update(False) == Decision()
    assert one.after_update(True) == Decision(is_interrupted=True)
    assert one.after_update(False, is_asked_to_save=True) == Decision(saves=True)
    assert one.now() == Decision()
    one.control.stop("enough")
    assert one.after_update(False) == one.now() == Decision(is_stopped=True)
    assert one.stop_reason is None
    one.state.counters.ended_early_of = 1
    assert one.stop_reason == "enough"


class Skipping:
    """Skips what it is told to."""

    inspects_batches = True

    def __init__(self, control: Control, epochs: set[int]) -> None:
        self.control, self.epochs = control, epochs

    def on_batch(self, batch: Any) -> None:
        if batch.epoch in self.epochs:
            self.control.skip_step()


def batches() -> Iterator[Any]:
    for epoch in range(9):
        for number in range(2):
            yield SimpleNamespace(epoch=epoch, number=number)


def test_batches_are_left_out() -> None:
    one = steering()
    kept = list(one.not_skipped(batches(), Skipping(one.control, {0, 3})))
    assert sorted({batch.epoch for batch in kept}) == [1, 2, 4, 5, 6, 7, 8]


def test_a_run_that_would_never_train_ends() -> None:
    one = steering()
    with pytest.raises(
        DataError, match=r"callbacks skipped 5 batches in a row, more than an epoch, so the run would ne"
    ):
        list(one.not_skipped(batches(), Skipping(one.control, set(range(9)))))

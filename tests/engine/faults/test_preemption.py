"""A notice of preemption: the run stops after the update at work if there is time, else with the one before it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.faults.preemption import GracePeriod
from onward.engine.interruption import StopRequest
from onward.engine.loop import Clock, StepDone
from onward.errors import Interrupted
from tests.mlp import assert_same_bits, data, start, state_bits
from tests.watching import Recorder


def signalled(seconds_ago: float) -> StopRequest:
    stop = StopRequest()
    stop.signal_name, stop.asked_at = "SIGTERM", time.monotonic() - seconds_ago
    return stop


def clock(step_seconds: float) -> Clock:
    measured = Clock()
    for _ in range(5):
        measured.add(step_seconds, 0.0, 1)
    return measured


@pytest.mark.parametrize(
    ("grace", "ago", "save_seconds", "step", "gives_up"),
    [
        (30.0, 0.0, 5.0, 1, False),  # 7 steps of 2 s and 5 s to save: 19 s
        (30.0, 12.0, 5.0, 1, True),
        (30.0, 12.0, 5.0, 3, False),  # 5 steps: 15 s of 18
        (18.0, 0.0, 5.0, 1, True),
        (None, 1e6, 5.0, 1, False),
        (1.0, 5.0, 5.0, 8, False),  # the update is done
    ],
)
def test_steps_are_given_up_where_their_update_would_come_too_late(
    grace: float | None, ago: float, save_seconds: float, step: int, gives_up: bool
) -> None:
    period = GracePeriod(seconds=grace, steps_of_update=8, world_size=1, clock=clock(2.0), save_seconds=save_seconds)
    done = StepDone(step=step, update=object() if step % 8 == 0 else None, report=None)  # type: ignore[arg-type]
    assert period.has_no_time_for_update(done, signalled(ago)) == gives_up
    assert not period.has_no_time_for_update(done, StopRequest())
    assert not GracePeriod(
        seconds=grace, steps_of_update=8, world_size=2, clock=clock(2.0), save_seconds=save_seconds
    ).has_no_time_for_update(done, signalled(ago))


def test_a_notice_that_comes_too_late_is_reported_once() -> None:
    assert (
        GracePeriod(seconds=30.0, steps_of_update=4, world_size=2, clock=clock(2.0), save_seconds=5.0).shortage()
        is None
    )
    assert (
        GracePeriod(seconds=None, steps_of_update=4, world_size=2, clock=clock(2.0), save_seconds=500.0).shortage()
        is None
    )
    period = GracePeriod(seconds=20.0, steps_of_update=4, world_size=2, clock=clock(2.0), save_seconds=5.0)
    said = period.shortage()
    assert said is not None
    assert said.startswith(
        "checkpoint.grace_seconds is 20, but stopping takes about 21.0 s: 2 weight updates of 8.0 s and a checkpoint "
        "of 5.0 s."
    )
    assert "--signal=USR1@SECONDS" in said
    assert period.shortage() is None


class SignalAt:
    """Sends this process a signal when a batch is read, and lets every later one take a while."""

    def __init__(self, batch: int, number: signal.Signals, seconds: float = 0.0) -> None:
        self.batch, self.number, self.seconds = batch, number, seconds

    def __call__(self, batches: Iterator[object]) -> Iterator[object]:
        for index, one in enumerate(batches):
            if index == self.batch:
                os.kill(os.getpid(), self.number)
            if index >= self.batch:
                time.sleep(self.seconds)
            yield one


class Signalled(InMemoryDataLoader):
    """Training data during which a signal comes."""

    at: Callable[[Iterator[object]], Iterator[object]]

    def batches(self, *arguments: object, **options: object) -> Iterator[object]:  # type: ignore[override]
        yield from self.at(super().batches(*arguments, **options))  # type: ignore[arg-type]


def signalled_data(at: SignalAt) -> Signalled:
    loader = Signalled(data(64))
    loader.at = at
    return loader


def stopped(folder: Path, at: SignalAt, accumulation: int = 1, **checkpoint: object) -> tuple[str, Recorder]:
    runner, recorder = start(
        folder,
        checkpoint={"checkpoints_dir": folder / "c", **checkpoint},
        training={"num_train_steps": 8, "gradient_accumulation_steps": accumulation},
    )
    with pytest.raises(Interrupted) as caught:
        runner.run(signalled_data(at))
    runner._initialized().checkpoints.close()
    return str(caught.value), recorder


def test_sigusr1_stops_where_it_is_asked_to(tmp_path: Path) -> None:
    """Slurm may send it again while the run saves: that ends nothing."""
    said, _ = stopped(tmp_path, SignalAt(2, signal.SIGUSR1), on_sigusr1="stop")
    assert said.startswith(f"stopped by SIGUSR1 after step 3; saved as {tmp_path}/c/checkpoint-00000003.")
    with StopRequest(save_signal_stops=True) as stop:
        for _ in itertools.repeat(None, 3):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.signal_name == "SIGUSR1"
        assert not stop.take_save()


def test_without_a_deadline_the_update_is_finished(tmp_path: Path) -> None:
    said, _ = stopped(tmp_path, SignalAt(5, signal.SIGTERM, 0.05), accumulation=4)
    assert "after step 8" in said


def test_accumulated_steps_are_given_up_before_the_deadline_and_the_run_resumes_bit_equal(tmp_path: Path) -> None:
    """Of eight steps in two updates, the signal comes in the sixth; the next two would take a second."""
    entire, _ = start(tmp_path, training={"num_train_steps": 8, "gradient_accumulation_steps": 4})
    entire.run(InMemoryDataLoader(data(64)))
    begin = time.monotonic()
    said, _ = stopped(tmp_path, SignalAt(5, signal.SIGTERM, 0.5), accumulation=4, grace_seconds=0.01)
    assert time.monotonic() - begin < 60
    assert said.startswith(f"stopped by SIGTERM after step 4; saved as {tmp_path}/c/checkpoint-00000001.")
    resumed, _ = start(
        tmp_path,
        checkpoint={"checkpoints_dir": tmp_path / "c"},
        training={"num_train_steps": 8, "gradient_accumulation_steps": 4},
    )
    resumed.run(InMemoryDataLoader(data(64)))
    assert_same_bits(state_bits(resumed), state_bits(entire))

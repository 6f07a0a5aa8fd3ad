"""The loop of one round: a generator that trains one step at a time and reports now and then.

It knows nothing of evaluation, checkpoints or screens; the runner decides what happens between two steps, and the
time it takes there is not counted as training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.batches import Batch
from onward.engine.reports import RunSummary, StepReport, UpdateReport
from onward.engine.state import Counters
from onward.engine.steps import Steps, UpdateResult
from onward.engine.utilization import Utilization
from onward.optim.schedules import LearningRateSchedule
from onward.parameters import Training

STABLE_STEPS = 128
"""Throughput that has settled is measured over this many last steps (as the original runner did)."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """One step is over.

    Attributes:
        step: steps done in this round.
        update: the weight update in which it ended, if it did.
        report: what to display, on updates that are displayed.
        epochs: passes over the data that it finished.
        origin: where the samples of its batch come from, as `Batch.origin`.
    """

    step: int
    update: UpdateReport | None
    report: StepReport | None
    epochs: int = 0
    origin: tuple[tuple[Path | str, Sequence[int] | np.ndarray], ...] = ()

    @property
    def is_update(self) -> bool:
        """Whether it ended in a weight update."""
        return self.update is not None


@dataclass(kw_only=True)
class Clock:
    """Times and samples of one call of the loop.

    Attributes:
        steps, samples: done in this call.
        train_seconds: spent in steps and in waiting for data.
        first_seconds: of these, the first step's.
        data_wait_seconds: the waiting alone.
        recent: (seconds, samples) of the last steps, the first of the call left out where there are others.
        utilization: what measures how well these times were used.
    """

    steps: int = 0
    samples: int = 0
    train_seconds: float = 0.0
    first_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=STABLE_STEPS))
    utilization: Utilization | None = None

    def add(self, seconds: float, waited_seconds: float, samples: int) -> None:
        """Counts one step."""
        self.steps += 1
        self.samples += samples
        self.train_seconds += seconds
        self.data_wait_seconds += waited_seconds
        if self.steps == 1:
            self.first_seconds = seconds
        if self.steps == 2:
            self.recent.clear()  # code is compiled and memory found in the first step, which says nothing of later ones
        self.recent.append((seconds, samples))

    @property
    def samples_per_second(self) -> float:
        """Over all steps of the call."""
        return _rate(self.samples, self.train_seconds)

    @property
    def seconds_of_a_step(self) -> float:
        """Over all steps but the first, in which code is compiled; the first one's while there is no other."""
        later = self.steps - 1
        return (self.train_seconds - self.first_seconds) / later if later > 0 else self.first_seconds

    @property
    def stable_samples_per_second(self) -> float:
        """Over the last steps only."""
        seconds = sum(s for s, _ in self.recent)
        return _rate(sum(n for _, n in self.recent), seconds)


@dataclass
class _Window:
    """What gathers between two reports."""

    seconds: float = 0.0
    waited_seconds: float = 0.0
    samples: int = 0
    tokens: int = 0

    def add(self, seconds: float, waited_seconds: float, samples: int, tokens: int) -> None:
        self.seconds += seconds
        self.waited_seconds += waited_seconds
        self.samples += samples
        self.tokens += tokens


def train_steps(
    steps: Steps,
    batches: Iterator[Batch],
    schedule: LearningRateSchedule,
    num_train_steps: int,
    display_loss_steps: int,
    clock: Clock,
) -> Iterator[StepDone]:
    """Trains until the round has `num_train_steps` steps, and says so after each.

    Reports come with the first update, with every `display_loss_steps`-th update and with the last.
    """
    state = steps.state
    replicas = state.mesh.topology.reader_count
    window = _Window()
    state.train()
    state.mark()
    while state.counters.step < num_train_steps:
        started = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - started
        step = state.counters.step + 1
        is_update = step % steps.accumulation == 0
        update = step // steps.accumulation
        shown = is_update and (update == 1 or update % display_loss_steps == 0 or step == num_train_steps)
        result: UpdateResult | None = None
        learning_rate = state.rate.of(schedule.at(step))
        if is_update:
            is_last = step + steps.accumulation > num_train_steps
            result = steps.update(batch, learning_rate, watch=shown, is_last=is_last)
        else:
            steps.accumulate(batch)
        state.counters.step = step
        if clock.utilization is not None:
            clock.utilization.see(batch)
        samples = batch.sample_count * replicas
        state.counters.samples += samples
        epochs, state.cursor = batch.cursor.epoch - state.cursor.epoch, batch.cursor
        if is_update:
            state.mark()
        seconds = time.perf_counter() - started
        clock.add(seconds, waited, samples)
        window.add(seconds, waited, samples, _count_tokens(batch) * replicas)
        report = done = None
        if result is not None:
            done = _report_update(state.counters, batch.epoch, learning_rate, num_train_steps, result)
        if shown and result is not None:
            report = _make_report(steps, window, result, batch, learning_rate, num_train_steps, clock)
            report = _with_utilization(report, clock)
            window = _Window()
        yield StepDone(step=step, update=done, report=report, epochs=epochs, origin=batch.origin)
    state.count_skipped()


def _with_utilization(report: StepReport, clock: Clock) -> StepReport:
    """The report completed; where MFU is measured now, that time is not counted as training."""
    utilization = clock.utilization
    if utilization is None:
        return report
    mfu = utilization.mfu(report.samples_per_second, clock.train_seconds)
    return dataclasses.replace(report, mfu=mfu, peak_memory_bytes=utilization.peak_memory_bytes())


def _report_update(
    counters: Counters, epoch: int, learning_rate: float, num_train_steps: int, result: UpdateResult
) -> UpdateReport:
    return UpdateReport(
        step=counters.step,
        num_train_steps=num_train_steps,
        update=counters.update,
        round=counters.round,
        epoch=epoch,
        learning_rate=learning_rate,
        samples=counters.samples,
        device_loss=result.loss,
        device_gradient_norm=result.norm,
    )


def _make_report(
    steps: Steps,
    window: _Window,
    result: UpdateResult,
    batch: Batch,
    learning_rate: float,
    num_train_steps: int,
    clock: Clock,
) -> StepReport:
    counters = steps.state.counters
    read_from = time.perf_counter()
    loss = steps.take_mean_loss()
    steps.state.count_skipped()
    # Waiting here for the device is training time too.
    seconds = window.seconds + time.perf_counter() - read_from
    remaining = num_train_steps - counters.step
    return StepReport(
        step=counters.step,
        num_train_steps=num_train_steps,
        update=counters.update,
        round=counters.round,
        epoch=batch.epoch,
        loss=loss,
        learning_rate=learning_rate,
        gradient_norm=result.gradient_norm,
        loss_scale=None if steps.state.loss_scale is None else steps.state.loss_scale.scale,
        skipped_updates=counters.skipped_updates,
        samples=counters.samples,
        samples_per_second=_rate(window.samples, seconds),
        tokens_per_second=_rate(window.tokens, seconds) if window.tokens else None,
        seconds=seconds,
        data_wait_seconds=window.waited_seconds,
        seconds_left=remaining * clock.seconds_of_a_step,
        tensors=result.tensors,
        module_paths=steps.watched.module_paths(result.tensors),
    )


def _rate(count: float, seconds: float) -> float:
    """A number a second; 0 by a clock that has stopped."""
    return count / seconds if seconds > 0 else 0.0


def _count_tokens(batch: Batch) -> int:
    """Elements of the longest integer sequence in a batch: its tokens; 0 where no sample is a sequence."""
    lengths = [
        array.size for array in batch.features.values() if _is_integer(array) and array.ndim == 2 and array.shape[1] > 1
    ]
    return max(lengths, default=0)


def _is_integer(array: Any) -> bool:
    return bool(array.dtype.kind in "iu")


def is_due(count: int, period: int) -> bool:
    """Whether something that happens every `period` steps or updates happens now; never where `period` is 0."""
    return period > 0 and count % period == 0


def summarize(
    training: Training,
    begin: Counters,
    end: Counters,
    clock: Clock,
    reports: Sequence[StepReport],
    metrics: Mapping[str, float],
    seconds: float,
    checkpoint: str | None,
    stopped: str | None = None,
) -> RunSummary:
    """The summary of one call of `TrainingRunner.run`, from what the loop counted and its first and last report."""
    used = clock.utilization
    return RunSummary(
        round=begin.round,
        steps=clock.steps,
        steps_before=begin.step,
        updates_before=begin.step // training.gradient_accumulation_steps if begin.round else begin.update,
        samples_before=begin.samples,
        updates=end.update - begin.update,
        skipped_updates=end.skipped_updates - begin.skipped_updates,
        samples=clock.samples,
        batch_size=training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        first_loss=reports[0].loss if reports else None,
        last_loss=reports[-1].loss if reports else None,
        seconds=seconds,
        train_seconds=clock.train_seconds,
        samples_per_second=clock.samples_per_second,
        stable_samples_per_second=clock.stable_samples_per_second,
        metrics=metrics,
        checkpoint=checkpoint,
        stopped=stopped,
        mfu=None if used is None else used.known_mfu(clock.stable_samples_per_second),
        peak_memory_bytes=None if used is None else used.peak_memory_bytes(),
    )


@contextlib.contextmanager
def closing_batches(batches: Iterator[Batch]) -> Iterator[Iterator[Batch]]:
    """Ends a stream of batches, and the thread that feeds it, however the loop is left."""
    try:
        yield batches
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()

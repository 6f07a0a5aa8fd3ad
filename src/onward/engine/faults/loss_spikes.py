"""Losses and gradient norms that are far above those before: the run returns to its last checkpoint and leaves out the
data of the update where it happened, on all ranks alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from onward.data.batches import Batch, DataCursor, Origin
from onward.engine.faults.skipped_updates import describe_origin
from onward.engine.loop import StepDone
from onward.engine.reports import RollBackReport
from onward.engine.state import TrainState
from onward.errors import ParametersError
from onward.parallel.agreement import agree_on_least
from onward.parameters import OnBadLoss

LEAST_UPDATES = 16
"""Before the window holds so many, nothing is called a spike."""

_OF_NORMAL = 1.4826
"""The standard deviation of a normal distribution in its median absolute deviations."""

_LEAST_LOSS_DEVIATION = 0.05
"""Of the median: losses that hardly vary are no reason to call a slightly larger one a spike."""

_LEAST_LOG_DEVIATION = 0.1
"""The same for logarithms of gradient norms."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """An update that is far above those before it; fields as of `RollBackReport`."""

    update: int
    cause: str
    value: float
    deviations: float
    samples: str


class RollBack(Exception):
    """Training is to return to the last checkpoint before an update.

    Attributes:
        update: the bad one.
        text: what happened, for the user.
        is_interrupted: a signal came meanwhile; the run is to end then.
    """

    def __init__(self, spike: Spike, text: str, is_interrupted: bool) -> None:
        super().__init__(text)
        self.update = spike.update
        self.text = text
        self.is_interrupted = is_interrupted
        self._spike = spike

    def to(self, path: str, update: int) -> RollBackReport:
        """What to report once training is back at the checkpoint of an update."""
        return RollBackReport(**asdict(self._spike), returned_to=update, path=path)


class LossSpikes:
    """Compares every update with those before it.

    Args:
        state: of the run; its `course` is what is compared, and belongs to checkpoints.
        settings: section `on_bad_loss`.
    """

    def __init__(self, state: TrainState, settings: OnBadLoss) -> None:
        self._state = state
        self._settings = settings
        self._begin = state.cursor
        self._micro_batches: list[Origin] = []

    def before_round(self, save: Callable[[], object]) -> None:
        """At the beginning of a round, saves what its first spike returns to."""
        if self._settings.spike_threshold is not None and self._state.counters.step == 0:
            save()

    def after_step(self, done: StepDone, is_interrupted: Callable[[], bool]) -> None:
        """Looks at an update; all ranks must ask after the same one.

        Raises:
            RollBack: it is a spike; the span of its data is in the state.
            ParametersError: there were too many.
        """
        threshold, course = self._settings.spike_threshold, self._state.course
        if threshold is None:
            return
        self._micro_batches.append(done.origin)
        if done.update is None:
            return
        begin, self._begin = self._begin, self._state.cursor
        batches, self._micro_batches = self._micro_batches, []
        loss, norm = (self._largest(one) for one in (done.update.loss, done.update.gradient_norm))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return  # such updates are skipped (`skipped_updates`)
        log_norm = math.log(max(norm, 1e-30))
        found = [
            ("loss", loss, _deviations(loss, course.losses, _LEAST_LOSS_DEVIATION, is_relative=True)),
            ("gradient norm", norm, _deviations(log_norm, course.log_norms, _LEAST_LOG_DEVIATION, is_relative=False)),
        ]
        name, value, deviations = max(found, key=lambda one: one[2])
        if len(course.losses) < LEAST_UPDATES or deviations <= threshold:
            course.add(loss, log_norm, self._settings.spike_window)
            return
        update, samples = done.update.update, describe_origin(batches)
        spike = Spike(update=update, cause=name, value=value, deviations=deviations, samples=samples)
        text = (
            f"update {spike.update}: its {name} {value:.4g} is {deviations:.0f} robust standard deviations above the "
            f"median of the last {len(course.losses)} updates ({spike.samples})"
        )
        if course.rollbacks >= self._settings.max_rollbacks:
            raise ParametersError(
                f"{text}; on_bad_loss.max_rollbacks allows {self._settings.max_rollbacks} of them. Look at these "
                "samples, lower learning_rate.initial_lr, set optimizer.max_norm_clip, or raise "
                "on_bad_loss.spike_threshold."
            )
        course.rollbacks += 1
        course.spans.append(((begin.epoch, begin.sample), (self._state.cursor.epoch, self._state.cursor.sample)))
        raise RollBack(spike, text, is_interrupted())

    def _largest(self, number: float) -> float:
        """The largest that any rank has, so that all ranks decide alike."""
        return -agree_on_least(self._state.mesh, -number if math.isfinite(number) else -math.inf)


def _deviations(value: float, window: Sequence[float], least: float, *, is_relative: bool) -> float:
    """How many robust standard deviations a value is above the median of a window."""
    if not window:
        return 0.0
    median = statistics.median(window)
    spread = _OF_NORMAL * statistics.median(abs(one - median) for one in window)
    return (value - median) / max(spread, least * (abs(median) if is_relative else 1.0), 1e-12)


def without_spans(batches: Iterator[Batch], state: TrainState) -> Iterator[Batch]:
    """The batches that are not in a span of data that is to be left out."""
    for batch in batches:
        place = _place(batch.cursor)
        if not any(begin < place <= end for begin, end in state.course.spans):
            yield batch


def _place(cursor: DataCursor) -> tuple[int, int]:
    return cursor.epoch, cursor.sample

"""What callbacks and signals ask of a run, agreed upon by all ranks and done between two weight updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from onward.data.batches import Batch
from onward.engine.callbacks import Control
from onward.engine.interruption import StopRequest
from onward.engine.state import TrainState
from onward.errors import DataError
from onward.optim.schedules import RateAdjustment
from onward.parallel.agreement import Heard, UpdateAgreement, agree_on_any

INTERRUPTED = "interrupted"
"""How the reason of a round begins that returned on an interruption."""

MESSAGE = {
    "stop": "a callback ends the round: 1, or nothing",
    "evaluate": "a callback wants an evaluation: 1, or nothing",
    "save": "a callback or a signal wants a checkpoint: 1, or nothing",
    "rate_scale": "the learning rate's factor, where a callback changed it",
    "rate_fixed": "the learning rate that a callback fixed, -1 for the schedule's, where a callback changed it",
}
"""What is sent with each update: name -> meaning. Of each number the largest that any rank gives counts."""


@dataclass(frozen=True)
class Decision:
    """What happens after an update, the same on every rank.

    Attributes:
        is_interrupted: a process got a signal: save, and stop as an error.
        is_stopped: a callback ends the round.
        evaluates, saves: a callback wants it now.
    """

    is_interrupted: bool = False
    is_stopped: bool = False
    evaluates: bool = False
    saves: bool = False

    def __or__(self, other: Decision) -> Decision:
        return Decision(
            self.is_interrupted or other.is_interrupted,
            self.is_stopped or other.is_stopped,
            self.evaluates or other.evaluates,
            self.saves or other.saves,
        )


class LooksAtBatches(Protocol):
    """Those who may skip a batch."""

    @property
    def inspects_batches(self) -> bool:
        """Whether anyone looks at batches."""

    def on_batch(self, batch: Batch) -> None:
        """Lets them look."""


class Steering:
    """Carries what callbacks ask for from their `Control` to the run.

    In one process that is at once. Between ranks it travels with each update and is heard after the next one
    (`UpdateAgreement`); before a checkpoint all of it is heard, so that a resumed run misses nothing.

    Args:
        state: whose learning rate is adjusted.
        control: what callbacks ask with.
    """

    def __init__(self, state: TrainState, control: Control) -> None:
        self.state = state
        self.control = control
        self._agreement = UpdateAgreement(state.mesh, tuple(MESSAGE))

    def after_update(self, is_interrupted: bool, is_asked_to_save: bool = False) -> Decision:
        """What to do now; all ranks must ask after the same update.

        Args:
            is_interrupted: this process got a signal to stop.
            is_asked_to_save: it got one to save, which every rank may.
        """
        own = self._own()
        if is_asked_to_save:
            own["save"] = 1.0
        return self._decide(self._agreement.after_update(is_interrupted, own))

    def raises(self, stop: StopRequest) -> bool:
        """Whether a signal came that ends the run as an error; one that returns ends the round as a callback would."""
        if stop.returns:
            self.control.stop(f"{INTERRUPTED} by Ctrl-C")
        return stop.signal_name is not None and not stop.returns

    def now(self) -> Decision:
        """All that was asked until now, also what has not travelled yet; all ranks must ask at the same moment."""
        heard = self._decide(self._agreement.settle())
        asked = self._decide(self._agreement.after_update(heard.is_interrupted, self._own()))
        return heard | asked | self._decide(self._agreement.settle())

    @property
    def stop_reason(self) -> str | None:
        """Why a callback, or an interruption, ended the round; None: none did."""
        is_interrupted = (self.control.stop_reason or "").startswith(INTERRUPTED)
        if not self.state.counters.ended_early_of and not is_interrupted:
            return None
        return self.control.stop_reason if self.state.mesh.rank == 0 else "a callback of rank 0"

    def is_interrupted_at_end(self, is_interrupted: bool) -> bool:
        """Whether a signal came until the last update, to any process."""
        return self._agreement.stops_at_end(is_interrupted)

    def not_skipped(self, batches: Iterator[Batch], watchers: LooksAtBatches) -> Iterator[Batch]:
        """The batches that no callback skips; if one rank's does, every rank leaves out its own.

        Raises:
            DataError: an entire epoch was skipped.
        """
        mesh = self.state.mesh
        if not agree_on_any(mesh, watchers.inspects_batches):
            yield from batches
            return
        skipped, since = 0, 0
        for batch in batches:
            self.control.begin_batch()
            watchers.on_batch(batch)
            if not agree_on_any(mesh, self.control.take_skip()):
                skipped = 0
                yield batch
                continue
            since = batch.epoch if skipped == 0 else since
            skipped += 1
            if batch.epoch > since + 1:
                raise DataError(
                    f"callbacks skipped {skipped} batches in a row, more than an epoch, so the run would never "
                    "train. Check the condition under which on_batch calls skip_step()."
                )

    def _own(self) -> dict[str, float | None]:
        asked = self.control.take_numbers()
        return asked if self.state.mesh.rank == 0 else {}

    def _decide(self, heard: Heard) -> Decision:
        numbers = heard.numbers
        scale, fixed = numbers["rate_scale"], numbers["rate_fixed"]
        if scale is not None and fixed is not None:
            self.state.rate = RateAdjustment(scale, None if fixed < 0 else fixed)
        stops, evaluates, saves = (numbers[name] is not None for name in ("stop", "evaluate", "save"))
        return Decision(heard.stops, stops, evaluates, saves)

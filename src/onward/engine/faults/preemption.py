"""The seconds between the notice of a preemption and the end of the process: whether an update and a save fit in."""

from __future__ import annotations

import time
from dataclasses import dataclass

from onward.engine.interruption import StopRequest
from onward.engine.loop import Clock, StepDone
from onward.parameters import Parameters


@dataclass(kw_only=True)
class GracePeriod:
    """What a run does with a notice: it stops after the update at work if there is time, else before it.

    Attributes:
        seconds: from the signal to the end that somebody else sets; None: nobody does.
        steps_of_update: gradient accumulation steps.
        world_size: processes; several of them stop after an update, which they agree upon one update later.
        clock: of the round.
        save_seconds: how long the last checkpoint took to be on the disk; 0: none was saved yet.
    """

    seconds: float | None
    steps_of_update: int
    world_size: int
    clock: Clock
    save_seconds: float = 0.0
    _is_reported: bool = False

    @classmethod
    def of(cls, parameters: Parameters, world_size: int, clock: Clock) -> GracePeriod:
        """As the parameters of a round say."""
        steps = parameters.training.gradient_accumulation_steps
        return cls(
            seconds=parameters.checkpoint.grace_seconds, steps_of_update=steps, world_size=world_size, clock=clock
        )

    def has_no_time_for_update(self, done: StepDone, stop: StopRequest) -> bool:
        """Whether the steps since the last update are given up, so that what was before them is saved in time."""
        if self.seconds is None or self.world_size > 1 or stop.signal_name is None or done.is_update:
            return False
        left = stop.asked_at + self.seconds - time.monotonic()
        return left < (self.steps_of_update - done.step % self.steps_of_update) * self._step_seconds + self.save_seconds

    def shortage(self) -> str | None:
        """Once, where a notice would come too late: how long stopping takes, and what to change."""
        if self.seconds is None or self._is_reported:
            return None
        updates = 1 if self.world_size == 1 else 2
        needed = updates * self.steps_of_update * self._step_seconds + self.save_seconds
        if needed <= self.seconds:
            return None
        self._is_reported = True
        return (
            f"checkpoint.grace_seconds is {self.seconds:g}, but stopping takes about {needed:.1f} s: {updates} weight "
            f"update{'s' if updates > 1 else ''} of {self.steps_of_update * self._step_seconds:.1f} s and a "
            f"checkpoint of {self.save_seconds:.1f} s. A preemption loses the updates since the last checkpoint: get "
            "more notice (Slurm: --signal=USR1@SECONDS with checkpoint.on_sigusr1: stop), or lower "
            "checkpoint.checkpoint_period or training.gradient_accumulation_steps."
        )

    @property
    def _step_seconds(self) -> float:
        recent = self.clock.recent
        return sum(seconds for seconds, _ in recent) / len(recent) if recent else 0.0

"""Learning-rate schedules: a factor from 0 to 1 for every step of a round, as pure functions of the step. They are the
ones of ONNX Runtime's training runner, except that what follows the warm-up begins where the warm-up ended, at 1."""

from __future__ import annotations

from dataclasses import dataclass

from onward.schedules.learning_rate.decay import Decay

DEFAULT_POWER = 0.5
"""Of the polynomial schedule: ONNX Runtime's runner took the square root."""


def factor(
    step: int, num_train_steps: int, decay: Decay, warmup_steps: float = 0.0, power: float = DEFAULT_POWER
) -> float:
    """The share of the highest learning rate that applies at a step.

    With N steps, W of them warm-up, it is step / W before step W, and then what the decay makes of the share of steps
    that is left after the warm-up, s = (N - step) / (N - W).

    Args:
        step: which forward/backward pass of the round, the first being 1.
        num_train_steps: passes in the round; at the last one, and after it, s is 0, or 1 if W = N.
        decay: what follows the warm-up.
        warmup_steps: passes over which the factor rises from 0 to 1; need not be whole.
        power: exponent of the polynomial schedule.

    Raises:
        ValueError: a step below 1, or a warm-up that is negative or longer than the round.
    """
    if step < 1 or num_train_steps < 1:
        raise ValueError(f"step {step} of {num_train_steps}; expected both to be at least 1")
    if not 0 <= warmup_steps <= num_train_steps:
        raise ValueError(
            f"a warm-up of {warmup_steps:g} steps; expected 0 to {num_train_steps}, the steps of the round"
        )
    if decay.has_warmup and step < warmup_steps:
        return step / warmup_steps
    if warmup_steps == num_train_steps:
        return 1.0
    return decay.factor(max(num_train_steps - step, 0) / (num_train_steps - warmup_steps), power)


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """The learning rate of every step of a round.

    Attributes:
        initial_lr: the highest rate.
        decay: what follows the warm-up.
        warmup_ratio: share of the round that is warm-up; None or 0: none.
        warmup_steps: the same in steps; one of the two at most.
        num_train_steps: forward/backward passes in the round.
        power: exponent of the polynomial schedule.
    """

    initial_lr: float
    decay: Decay
    warmup_ratio: float | None
    warmup_steps: int | None
    num_train_steps: int
    power: float = DEFAULT_POWER

    def __post_init__(self) -> None:
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError(
                f"learning_rate.warmup_ratio is {self.warmup_ratio:g} and learning_rate.warmup_steps is "
                f"{self.warmup_steps}; expected one of the two"
            )
        self.at(1)

    def at(self, step: int) -> float:
        """The learning rate at a step of the round, the first being 1."""
        if self.warmup_steps:
            warmup_steps = float(self.warmup_steps)
        else:
            warmup_steps = (self.warmup_ratio or 0.0) * self.num_train_steps
        return self.initial_lr * factor(step, self.num_train_steps, self.decay, warmup_steps, self.power)


@dataclass(frozen=True)
class RateAdjustment:
    """How callbacks changed the learning rate of a round.

    Attributes:
        scale: what the rate is multiplied by.
        fixed: the rate that replaces the schedule's; None: none does.
    """

    scale: float = 1.0
    fixed: float | None = None

    def of(self, scheduled: float) -> float:
        """The rate to train at where the schedule says `scheduled`."""
        return self.scale * (scheduled if self.fixed is None else self.fixed)

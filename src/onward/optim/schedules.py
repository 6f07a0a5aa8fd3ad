"""Learning-rate schedules: a factor for every step of a round, as pure functions of the step. They are the
ones of ONNX Runtime's training runner, except that what follows the warm-up begins where the warm-up ended, at 1."""

from __future__ import annotations

from dataclasses import dataclass

from onward.parameters import LearningRate
from onward.schedules.learning_rate.decay import Decay
from onward.schedules.learning_rate.registry import decay_named

DEFAULT_OPTIONS = LearningRate(initial_lr=1.0)


def factor(
    step: int,
    num_train_steps: int,
    decay: Decay,
    warmup_steps: float = 0.0,
    options: LearningRate = DEFAULT_OPTIONS,
) -> float:
    """The share of the highest learning rate that applies at a step.

    With N steps, W of them warm-up, it is step / W before step W, and then what the decay makes of the share of steps
    that is left after the warm-up, s = (N - step) / (N - W).

    Args:
        step: which forward/backward pass of the round, the first being 1.
        num_train_steps: passes in the round; at the last one, and after it, s is 0, or 1 if W = N.
        decay: what follows the warm-up.
        warmup_steps: passes over which the factor rises from 0 to 1; need not be an integer.
        options: of the decay.

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
    return decay.ratio(max(num_train_steps - step, 0) / (num_train_steps - warmup_steps), options)


@dataclass(frozen=True)
class LearningRateSchedule:
    """The learning rate of every step of a round.

    Attributes:
        rate: the section `learning_rate`.
        num_train_steps: forward/backward passes in the round.
    """

    rate: LearningRate
    num_train_steps: int

    def __post_init__(self) -> None:
        ratio, steps = self.rate.warmup_ratio, self.rate.warmup_steps
        if ratio and steps:
            raise ValueError(
                f"learning_rate.warmup_ratio is {ratio:g} and learning_rate.warmup_steps is {steps}; expected one of "
                "the two"
            )
        self.at(1)

    def at(self, step: int) -> float:
        """The learning rate at a step of the round, the first being 1."""
        rate = self.rate
        warmup_steps = float(rate.warmup_steps or (rate.warmup_ratio or 0.0) * self.num_train_steps)
        decay = decay_named(rate.warmup_mode)
        return rate.initial_lr * factor(step, self.num_train_steps, decay, warmup_steps, rate)


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

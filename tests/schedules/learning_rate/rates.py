"""The factors of a schedule, for comparisons with other schedulers."""

from __future__ import annotations

from typing import Any

from onward.optim.schedules import factor
from onward.parameters import LearningRate
from onward.schedules.learning_rate.registry import decay_named


def rates(mode: str, steps: int, warmup_steps: int = 0, **options: Any) -> list[float]:
    """Factors from the end of the warm-up on: of the step before the first decayed one, to the last step."""
    decay = decay_named(mode)
    found = [
        factor(step, steps, decay, warmup_steps, LearningRate(initial_lr=1.0, **options))
        for step in range(1, steps + 1)
    ]
    return found[warmup_steps - 1 :] if warmup_steps else [1.0, *found]

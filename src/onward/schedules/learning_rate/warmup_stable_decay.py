"""The highest rate for most of the round, and a short decay at its end (Hu et al. 2024, arXiv 2404.06395)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from onward.schedules.learning_rate.cosine import half_period
from onward.schedules.learning_rate.decay import Decay, DecayShape

if TYPE_CHECKING:
    from onward.parameters import LearningRate

_SHAPES: dict[DecayShape, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": half_period,
    "one_minus_sqrt": lambda left: 1.0 - math.sqrt(1.0 - left),
}
"""Share of the decay that is left -> factor."""


def _factor(left: float, options: LearningRate) -> float:
    return _SHAPES[options.decay_shape](left / options.decay_ratio) if left < options.decay_ratio else 1.0


WARMUP_STABLE_DECAY = Decay(name="wsd", factor=_factor, reads=("min_ratio", "decay_ratio", "decay_shape"))

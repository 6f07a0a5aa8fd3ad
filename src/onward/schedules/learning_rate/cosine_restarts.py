"""Half periods of a cosine in a row, each from the highest rate (Loshchilov & Hutter 2017, arXiv 1608.03983)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.schedules.learning_rate.cosine import half_period
from onward.schedules.learning_rate.decay import Decay

if TYPE_CHECKING:
    from onward.parameters import LearningRate

_ROUNDING = 1e-9
"""A step at which a cycle begins belongs to it, however its share of the round was rounded."""


def _factor(left: float, options: LearningRate) -> float:
    lengths = [options.cycle_growth**index for index in range(options.cycles)]
    done = (1.0 - left) * sum(lengths)
    for length in lengths[:-1]:
        if done < length - _ROUNDING:
            return half_period(1.0 - done / length)
        done = max(done - length, 0.0)
    return half_period(1.0 - min(done / lengths[-1], 1.0))


COSINE_RESTARTS = Decay(name="cosine_restarts", factor=_factor, reads=("min_ratio", "cycles", "cycle_growth"))

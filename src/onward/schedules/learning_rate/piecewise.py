"""Straight lines between points that the user lists."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from onward.schedules.learning_rate.decay import Decay

if TYPE_CHECKING:
    from onward.parameters import LearningRate

_ROUNDING = 1e-9


def _factor(left: float, options: LearningRate) -> float:
    done = 1.0 - left
    points = ((0.0, options.points[0][1]), *options.points, (1.0, options.points[-1][1]))
    for (begin, first), (end, last) in pairwise(points):
        # At a step where two points are, the second counts; at the end of the round, the last.
        if done < end - _ROUNDING:
            return first + (last - first) * (done - begin) / (end - begin)
    return points[-1][1]


PIECEWISE = Decay(name="piecewise", factor=_factor, has_warmup=False, reads=("points",))

"""Half a period of a cosine."""

from __future__ import annotations

import math

from onward.schedules.learning_rate.decay import Decay


def half_period(left: float) -> float:
    """1 where all of it is left, 0 at the end."""
    return 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))


COSINE = Decay(name="cosine", factor=lambda left, options: half_period(left), reads=("min_ratio",))

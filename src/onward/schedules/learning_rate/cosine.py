"""Half a period of a cosine."""

from __future__ import annotations

import math

from onward.schedules.learning_rate.decay import Decay

COSINE = Decay(name="cosine", factor=lambda left, power: 0.5 * (1.0 + math.cos(math.pi * (1.0 - left))))

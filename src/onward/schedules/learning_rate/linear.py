"""A straight line to 0."""

from __future__ import annotations

from onward.schedules.learning_rate.decay import Decay

LINEAR = Decay(name="linear", factor=lambda left, options: left, reads=("min_ratio",))

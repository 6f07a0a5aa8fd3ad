"""The highest rate after the warm-up."""

from __future__ import annotations

from onward.schedules.learning_rate.decay import Decay

CONSTANT = Decay(name="constant", factor=lambda left, options: 1.0)

"""The highest rate from the first step on."""

from __future__ import annotations

from onward.schedules.learning_rate.decay import Decay

NONE = Decay(name="none", has_warmup=False, factor=lambda left, options: 1.0)

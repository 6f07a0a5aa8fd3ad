"""A power of the share of steps that is left; ONNX Runtime's runner took the square root."""

from __future__ import annotations

import math

from onward.schedules.learning_rate.decay import Decay

POLYNOMIAL = Decay(
    name="polynomial",
    factor=lambda left, options: math.pow(left, options.power),
    other_name="poly",
    reads=("power", "min_ratio"),
)

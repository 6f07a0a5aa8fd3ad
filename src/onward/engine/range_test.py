"""The learning-rate range test: train while the rate rises, and see where the loss falls fastest.

After Smith, "Cyclical Learning Rates for Training Neural Networks" (2017), section 3.3; the exponential rise, the
smoothing and the stop are those of Howard and Gugger, "fastai: A Layered API for Deep Learning" (2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from onward.data.batches import Batch
from onward.engine.steps import Steps

SMOOTHING = 0.9
"""Share of the running mean that stays with each new loss; its bias at the beginning is divided out."""

DIVERGENCE = 4.0
"""The test ends where the smoothed loss is so many times the smallest one."""

_LEFT_OUT = 0.1
"""Share of the points at the beginning that are never suggested: their mean is of few losses."""

_WINDOW = 1.0
"""Decades of rates over which the slope of the loss is measured."""


@dataclass(frozen=True)
class Point:
    """One weight update of the test."""

    learning_rate: float
    loss: float
    smoothed: float


@dataclass(frozen=True)
class RangeTest:
    """What a range test found.

    Attributes:
        points: one for each update, by rising rate.
        diverged: whether it ended before the last rate because the loss rose.
        steepest: rate at which the smoothed loss falls fastest over the logarithm of the rate.
        lowest: rate with the smallest smoothed loss.
    """

    points: tuple[Point, ...]
    diverged: bool
    steepest: float | None
    lowest: float | None

    @property
    def suggestion(self) -> float | None:
        """The steepest point, at most a tenth of the rate with the smallest loss; None: the loss fell nowhere."""
        if self.steepest is None or self.lowest is None:
            return None
        return min(self.steepest, self.lowest / 10)


def rates(lowest: float, highest: float, updates: int) -> list[float]:
    """Learning rates in equal steps of their logarithm, both ends included."""
    if updates == 1:
        return [lowest]
    growth = math.log(highest / lowest) / (updates - 1)
    return [lowest * math.exp(growth * update) for update in range(updates)]


def run_range_test(
    steps: Steps, batches: Iterator[Batch], tried: Sequence[float], each: Callable[[Point], None] | None = None
) -> RangeTest:
    """Trains one update at each rate, until the loss diverges.

    Args:
        steps: over a train state of which nothing is kept.
        batches: of training data.
        tried: rising learning rates.
        each: is called with every point.
    """
    points: list[Point] = []
    mean = 0.0
    steps.state.train()
    steps.state.mark()
    for rate in tried:
        for _ in range(steps.accumulation - 1):
            steps.accumulate(next(batches))
        steps.update(next(batches), rate, watch=False)
        loss = steps.take_mean_loss()
        if not math.isfinite(loss):
            return result_of(points, True)
        steps.state.mark()
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        point = Point(rate, loss, mean / (1 - SMOOTHING ** (len(points) + 1)))
        points.append(point)
        if each is not None:
            each(point)
        least = min(one.smoothed for one in points)
        if len(points) > 1 and point.smoothed > (DIVERGENCE * least if least > 0 else least + DIVERGENCE * abs(least)):
            return result_of(points, True)
    return result_of(points, False)


def _slope(points: Sequence[Point], index: int) -> float:
    """Of a line fitted to the smoothed loss over a decade of rates around a point: single losses are noisy."""
    center = math.log10(points[index].learning_rate)
    near = [(math.log10(one.learning_rate) - center, one.smoothed) for one in points]
    near = [pair for place, pair in enumerate(near) if abs(pair[0]) <= _WINDOW / 2 or abs(place - index) <= 1]
    mean_x, mean_y = (sum(pair[axis] for pair in near) / len(near) for axis in (0, 1))
    return sum((x - mean_x) * (y - mean_y) for x, y in near) / sum((x - mean_x) ** 2 for x, _ in near)


def result_of(points: Sequence[Point], diverged: bool) -> RangeTest:
    """Finds the steepest descent and the smallest smoothed loss."""
    first = max(1, round(_LEFT_OUT * len(points)))
    slopes = {index: _slope(points, index) for index in range(first, len(points) - 1)}
    if not slopes:
        return RangeTest(tuple(points), diverged, None, None)
    lowest = min(range(first, len(points)), key=lambda index: points[index].smoothed)
    before = {index: slope for index, slope in slopes.items() if index <= lowest}
    steepest = min(before, key=before.__getitem__, default=None)
    if steepest is None or before[steepest] >= 0:
        return RangeTest(tuple(points), diverged, None, None)
    return RangeTest(tuple(points), diverged, points[steepest].learning_rate, points[lowest].learning_rate)

"""The range test's arithmetic, on curves whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onward.engine.range_test import Point, rates, result_of


def curve(tried: list[float], loss: list[float]) -> list[Point]:
    return [Point(rate, one, one) for rate, one in zip(tried, loss, strict=True)]


def test_rates_are_numpys_geomspace() -> None:
    np.testing.assert_allclose(rates(1e-7, 1.0, 100), np.geomspace(1e-7, 1.0, 100), rtol=1e-12)
    assert rates(1e-3, 1.0, 1) == [1e-3]


@pytest.mark.parametrize("middle", [1e-4, 1e-3, 1e-2])
def test_the_steepest_point_of_a_sigmoid_is_its_middle(middle: float) -> None:
    tried = rates(1e-7, 1.0, 400)
    loss = [1 / (1 + (rate / middle) ** 1.5) for rate in tried]
    found = result_of(curve(tried, loss), False)
    assert found.steepest is not None
    assert abs(math.log10(found.steepest / middle)) < 0.02
    assert found.lowest == tried[-1]
    assert found.suggestion == found.steepest


def test_it_is_at_most_a_tenth_of_the_rate_with_the_smallest_loss() -> None:
    tried = rates(1e-6, 1.0, 200)
    loss = [1 - math.exp(-((math.log10(rate / 1e-2)) ** 2) * 4) for rate in tried]
    found = result_of(curve(tried, loss), True)
    assert found.lowest is not None
    assert abs(math.log10(found.lowest / 1e-2)) < 0.02
    assert found.suggestion == pytest.approx(found.lowest / 10)


def test_a_loss_that_only_rises_has_no_suggestion() -> None:
    tried = rates(1e-6, 1.0, 50)
    assert result_of(curve(tried, [float(k) for k in range(50)]), True).suggestion is None
    assert result_of(curve(tried[:2], [2.0, 1.0]), True).suggestion is None
    assert result_of([], True).suggestion is None

"""Lines between points, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.schedules.learning_rate.rates import rates


def test_points_are_joined_by_lines_and_may_jump() -> None:
    points = ((0.0, 0.0), (0.1, 1.0), (0.5, 1.0), (0.5, 0.25), (0.9, 0.05))
    found = rates("piecewise", 20, points=points)[1:]
    expected = [0.5, *[1.0] * 8, *np.interp(np.arange(10, 21) / 20, [0.5, 0.9], [0.25, 0.05])]
    assert found == pytest.approx(expected, rel=0, abs=1e-12)
    assert rates("piecewise", 10, points=((0.3, 0.7),))[1:] == [0.7] * 10
    numpy = rates("piecewise", 33, points=((0.2, 2.0), (0.7, 0.5), (1.0, 0.0)))[1:]
    assert numpy == pytest.approx(np.interp(np.arange(1, 34) / 33, [0.2, 0.7, 1.0], [2.0, 0.5, 0.0]), rel=0, abs=1e-12)

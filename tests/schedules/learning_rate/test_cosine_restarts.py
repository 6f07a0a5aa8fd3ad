"""Restarts against torch's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from tests.schedules.learning_rate.rates import rates


@pytest.mark.parametrize(("cycles", "growth", "first"), [(1, 1, 48), (3, 1, 16), (2, 2, 16), (4, 3, 2)])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_cosine_restarts_equal_torch_s(cycles: int, growth: int, first: int, floor: float) -> None:
    """To 1e-12. At the last step, where torch would begin another cycle, the rate is that of the floor."""
    steps = sum(first * growth**index for index in range(cycles))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=first, T_mult=growth, eta_min=floor)
    expected = []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    for warmup in (0, 5):
        found = rates("cosine_restarts", steps + warmup, warmup, cycles=cycles, cycle_growth=growth, min_ratio=floor)
        assert found == pytest.approx([*expected, floor], rel=0, abs=1e-12)
    assert sum(after > before for before, after in itertools.pairwise(found)) == cycles - 1


@pytest.mark.parametrize("steps", range(2, 200, 7))
@pytest.mark.parametrize("cycles", [2, 3, 7])
def test_a_restart_is_at_one_step(steps: int, cycles: int) -> None:
    """However shares of the round are rounded: cycles of `steps` steps, each begins at the highest rate."""
    found = rates("cosine_restarts", steps * cycles, cycles=cycles)
    assert [index for index, rate in enumerate(found) if rate == 1.0] == [steps * index for index in range(cycles)]

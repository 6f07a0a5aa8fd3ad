"""Warm-up, a constant rate and a decay, against those of transformers."""

from __future__ import annotations

import pytest
import torch

from tests.schedules.learning_rate.rates import rates


@pytest.mark.parametrize("shape", ["linear", "cosine", "one_minus_sqrt"])
@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_wsd_equals_that_of_transformers(shape: str, floor: float) -> None:
    """To 1e-12: 10 steps of warm-up, 60 at the highest rate, 20 of decay."""
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = optimization.get_wsd_schedule(
        optimizer, 10, 20, num_stable_steps=60, min_lr_ratio=floor, decay_type=shape.replace("one_minus_", "1-")
    )
    expected = []
    for _ in range(90):
        optimizer.step()
        scheduler.step()
        expected.append(scheduler.get_last_lr()[0])
    found = rates("wsd", 90, 10, decay_ratio=0.25, decay_shape=shape, min_ratio=floor)
    assert found == pytest.approx(expected[9:], rel=0, abs=1e-12)

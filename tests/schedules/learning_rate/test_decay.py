"""What decays share: the floor, and the options that they read."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from onward.parameters import LearningRate
from onward.schedules.learning_rate.registry import DECAYS
from tests.schedules.learning_rate.rates import rates


@pytest.mark.parametrize("mode", ["linear", "polynomial", "cosine"])
def test_a_floor(mode: str) -> None:
    """The decay is scaled to it: torch's cosine ends at eta_min."""
    plain, raised = rates(mode, 40, 4), rates(mode, 40, 4, min_ratio=0.1)
    assert raised == pytest.approx([0.1 + 0.9 * rate for rate in plain], rel=0, abs=1e-15)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = CosineAnnealingLR(optimizer, T_max=36, eta_min=0.1)
    for rate in raised if mode == "cosine" else []:
        assert rate == pytest.approx(scheduler.get_last_lr()[0], rel=0, abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_every_option_is_read_by_a_decay() -> None:
    others = {"initial_lr", "warmup_mode", "warmup_ratio", "warmup_steps"}
    assert {name for decay in DECAYS for name in decay.reads} == {one.name for one in fields(LearningRate)} - others

"""A decay is one file and one line: one that onward does not have, registered by that line, trains from RUN.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from onward.errors import ParametersError
from onward.schedules.learning_rate import registry
from onward.schedules.learning_rate.decay import Decay
from tests.mlp import parameters, train_by_torch, train_run, write_sgd_run

LATE = Decay(name="late", factor=lambda left, options: 1.0 - (1.0 - left) ** 2)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DECAYS", (*registry.DECAYS, LATE))


def test_a_new_decay_trains_from_run_yaml(tmp_path: Path) -> None:
    """To 1e-5 of torch's SGD at the rates of the formula: 2 steps of warm-up, then 1 - (1 - s)^2."""
    rate = {"initial_lr": 0.1, "warmup_mode": "Late", "warmup_steps": 2}
    trained = train_run(write_sgd_run(tmp_path, learning_rate=rate))
    rates = [0.05, *(0.1 * (1 - (1 - left / 6) ** 2) for left in (6, 5, 4, 3, 2, 1, 0))]
    for name, tensor in train_by_torch(F.mse_loss, rates).items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-5)


def test_messages_list_it(tmp_path: Path) -> None:
    with pytest.raises(
        ParametersError,
        match=r"expected none, constant, .* wsd, piecewise or late",
    ):
        parameters(tmp_path, learning_rate={"initial_lr": 0.1, "warmup_mode": "later"})

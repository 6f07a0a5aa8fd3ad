"""Updates that the device skips by itself: the same bits as where the host decides, and nobody waits for numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.engine import steps
from onward.engine.state import TrainState
from onward.optim.lamb import Lamb
from onward.optim.loss_scale import LossScale
from tests.mlp import SQUARES, assert_same_bits, data, save_mlp, start, state_bits

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"training_optimizer_name": "AdamW", "max_norm_clip": 0.5},
    "Adam": {"training_optimizer_name": "Adam"},
    "SGD with momentum": {
        "training_optimizer_name": "SGDOptimizer",
        "optimizer_attributes": [{"weights": "*", "momentum": 0.9}],
    },
}


def broken(number: float) -> InMemoryDataLoader:
    """Samples of which one, and so its batch, makes gradients that are not finite."""
    features = data(32)
    features["x"][9, 2] = number
    return InMemoryDataLoader(features)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=list(OPTIMIZERS))
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_the_device_skips_what_the_host_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, number: float
) -> None:
    """Weights, moments, step counts, running statistics, and what is reported of it."""
    save_mlp(tmp_path, normalized=True)
    found = {}
    for on_device in (False, True):
        monkeypatch.setattr(steps, "skips_on_device", lambda _, on_device=on_device: on_device)
        runner, recorder = start(tmp_path, optimizer=OPTIMIZERS[optimizer])
        summary = runner.run(broken(number))
        assert summary.skipped_updates == runner.state.record()["counters"]["skipped_updates"] == 1
        found[on_device] = (
            state_bits(runner),
            [(report.loss, report.gradient_norm, report.skipped_updates) for report in recorder.steps],
        )
    assert_same_bits(found[True][0], found[False][0])
    np.testing.assert_array_equal(found[True][1], found[False][1])


def test_what_is_skipped_between_two_reports_is_counted_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_mlp(tmp_path)
    monkeypatch.setattr(steps, "skips_on_device", lambda _: True)
    runner, recorder = start(tmp_path, training={"display_loss_steps": 100})
    assert runner.run(broken(np.nan)).skipped_updates == 1
    assert [report.skipped_updates for report in recorder.steps] == [0, 1]


def test_nobody_waits_for_numbers_between_two_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many updates are between the first and the last, as many numbers are read.

    (Cross entropy on a CPU looks at its labels; on a GPU it does not.)
    """
    save_mlp(tmp_path, normalized=True)
    monkeypatch.setattr(steps, "skips_on_device", lambda _: True)
    reads: list[str] = []
    for name in ("__float__", "__int__", "__bool__", "item", "tolist"):
        original = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, original: Any = original, name: str = name) -> Any:
            reads.append(name)
            return original(tensor)

        monkeypatch.setattr(torch.Tensor, name, read)
    counts = []
    for updates in (4, 12):
        training = {"num_train_steps": updates, "display_loss_steps": 100}
        runner, _ = start(tmp_path, optimizer=OPTIMIZERS["AdamW"], training=training, loss=SQUARES)
        reads.clear()
        runner.run(InMemoryDataLoader(data(32)))
        counts.append(len(reads))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("device", "loss_scale", "lamb", "expected"),
    [
        ("cuda", None, False, True),
        ("cuda", LossScale(scale=128.0, dynamic=False), False, True),
        ("cuda", LossScale(), False, False),
        ("cuda", None, True, False),
        ("cpu", None, False, False),
    ],
)
def test_when_the_device_skips(device: str, loss_scale: LossScale | None, lamb: bool, expected: bool) -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    optimizer = Lamb(weights) if lamb else torch.optim.AdamW(weights, fused=True)
    state = SimpleNamespace(device=torch.device(device), loss_scale=loss_scale, optimizer=optimizer)
    assert steps.skips_on_device(cast(TrainState, state)) is expected

"""Optimizers of torch.optim on a device with accumulation, clipping and fp16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.data.in_memory import InMemoryDataLoader
from onward_device import Trainer
from tests.device.bundles import BATCH, Features, batches, bundle_of, samples, sections
from tests.mlp import save_mlp, start
from tests.optim.test_torch_class import NAMES, options_of

PASSES, ACCUMULATION = 12, 2
RATES = {"Adadelta": 1.0, "Rprop": 0.01, "ASGD": 0.5, "Adagrad": 0.1, "RMSprop": 0.005}
QUICK = ("torch.optim.RAdam",)
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
ROUNDED_IN_FP16 = 2e-2
"""Relative, of a loss; Rprop goes by signs, and those of small gradients differ in fp16."""


def asked(name: str, **sections_of_run: Any) -> dict[str, Any]:
    """A run whose clipping does something."""
    short = name.rpartition(".")[2]
    optimizer = {
        "training_optimizer_name": name,
        "optimizer_attributes": [{"options": options_of(name)}],
        "max_norm_clip": 0.2,
        "layer_decay": None,
    }
    training = {"num_train_steps": PASSES, "gradient_accumulation_steps": ACCUMULATION}
    rate = {"initial_lr": RATES.get(short, 0.02), "warmup_mode": "constant", "warmup_steps": 2}
    return {"optimizer": optimizer, "training": training, "learning_rate": rate, **sections_of_run}


def of_updates(losses: list[float]) -> list[float]:
    return [float(loss) for loss in np.reshape(losses, (-1, ACCUMULATION)).mean(1)]


def given() -> Features:
    return samples(PASSES * BATCH)


@pytest.mark.parametrize("name", EACH)
def test_accumulated_and_clipped_updates_are_those_of_onward(name: str, tmp_path: Path) -> None:
    save_mlp(tmp_path)
    runner, recorder = start(tmp_path, **sections(**asked(name)))
    runner.run(InMemoryDataLoader(dict(given())))
    trainer, norms, losses = Trainer.load(bundle_of(tmp_path, **asked(name))), set(), []
    before = trainer.state()
    for batch in batches(given(), PASSES):
        losses.append(trainer.train_step(batch))
        norms.add(trainer.gradient_norm)
    assert of_updates(losses) == pytest.approx(recorder.losses, abs=1e-5)
    assert max(norm for norm in norms if norm is not None) > 0.2
    for key, weight in runner.net.weights.items():
        assert np.abs(trainer.state()[key] - weight.detach().numpy()).max() < 2e-5, key
        assert np.abs(trainer.state()[key] - before[key]).max() > 1e-4, key
    fp16 = bundle_of(tmp_path, **asked(name, mixed_precision={"use_mixed_precision": True}))
    wide, narrow = losses, Trainer.load(fp16)
    losses = [narrow.train_step(batch) for batch in batches(given(), PASSES)]
    assert not narrow.skipped_updates
    assert losses == pytest.approx(wide, rel=ROUNDED_IN_FP16)
    assert losses != pytest.approx(wide, rel=1e-7)

"""Bundles of small runs, and the same runs by `onward train`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from onward.data.in_memory import InMemoryDataLoader
from onward.device.bundle import write_bundle
from onward_device import Trainer
from tests.mlp import CROSS_ENTROPY, data, save_mlp, start

BATCH = 4
Features = Mapping[str, np.ndarray]


def sections(**changes: Any) -> dict[str, Any]:
    """Sections of a run of 50 steps in which every part of an update does something."""
    found: dict[str, Any] = {
        "optimizer": {
            "training_optimizer_name": "AdamW",
            "max_norm_clip": 0.5,
            "layer_decay": 0.5,
            "optimizer_attributes": [{"lambda": 0.1}],
        },
        "training": {"batch_size": BATCH, "num_train_steps": 50, "display_loss_steps": 1},
        "learning_rate": {"initial_lr": 0.05, "warmup_mode": "cosine", "warmup_steps": 10},
    }
    return {name: {**found.get(name, {}), **changes.get(name, {})} for name in {**found, **changes}}


def run_file(folder: Path, **changes: Any) -> Path:
    """The RUN.yaml of the model in a folder, with what `sections` say."""
    run = {"paths": {"model_path": "mlp.onnx"}, "loss": CROSS_ENTROPY, **sections(**changes)}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def bundle_of(folder: Path, *, weights_inside: bool = False, **changes: Any) -> Path:
    """The bundle of the model in a folder, trained as `sections` say."""
    return write_bundle(run_file(folder, **changes), folder / "bundle", weights_inside=weights_inside)


def file_of_weights(bundle: Path) -> str:
    """The file of a bundle that its state begins with."""
    state = json.loads((bundle / "manifest.json").read_text())["state"]
    return str(next(one["start"]["file"] for one in state if "file" in one["start"]))


def batches(features: Features, count: int = 50) -> list[dict[str, np.ndarray]]:
    return [{name: a[i * BATCH : (i + 1) * BATCH] for name, a in features.items()} for i in range(count)]


def samples(count: int = 50 * BATCH) -> dict[str, np.ndarray]:
    return {name: array for name, array in data(count).items() if name in ("x", "label")}


def check_against_onward(folder: Path, features: Features, **changes: Any) -> Trainer:
    """Trains with both; the losses of every update, and the weights at the end, are the same."""
    runner, recorder = start(folder, **sections(**changes))
    runner.run(InMemoryDataLoader(dict(features)))
    trainer = Trainer.load(folder / "bundle")
    losses = [trainer.train_step(batch) for batch in batches(features)]
    assert recorder.losses[-1] < recorder.losses[0] * 0.9
    assert losses == pytest.approx(recorder.losses, abs=1e-5)
    state = trainer.state()
    for name, weight in runner.net.weights.items():
        assert np.abs(state[name] - weight.detach().numpy()).max() < 2e-5, name
    for name in runner.net.graph.states:
        assert np.abs(state[name] - runner.net.tensors_by_name()[name].numpy()).max() < 1e-5, name
    return trainer


@pytest.fixture(scope="session")
def normalized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a network with batch normalization: a bias before it would follow rounding errors alone."""
    folder = tmp_path_factory.mktemp("normalized")
    save_mlp(folder, normalized=True)
    bundle_of(folder, training={"weights_not_to_train": ["b1"]})
    return folder

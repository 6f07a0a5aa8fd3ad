"""Ten simulated devices, each with its share of the digits, and a server that averages what they save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from sklearn.datasets import load_digits

from onward.device.bundle import write_bundle
from onward.device.device_states import average_states, read_state, write_state
from onward.graph.writing.model_saving import save_model
from onward.models import create_model
from onward_device import Trainer

DEVICES, ROUNDS, EPOCHS, BATCH, TRAINED = 10, 6, 6, 35, 1400
"""In every round each device trains some epochs on its own samples."""


@pytest.mark.slow
def test_ten_devices_reach_the_accuracy_of_one(tmp_path: Path) -> None:
    save_model(create_model("mnist", variant="gemm", image_size=8, hidden=64, seed=1), tmp_path / "digits.onnx")
    run = {
        "paths": {"model_path": "digits.onnx"},
        "loss": {"type": "softmax_cross_entropy", "prediction": "predictions", "label": "label"},
        "training": {"batch_size": BATCH, "num_train_steps": 240, "mapped_dimensions": {"batch": BATCH}},
        "optimizer": {"training_optimizer_name": "AdamW"},
        "learning_rate": {"initial_lr": 0.01},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    bundle = write_bundle(tmp_path / "run.yaml", tmp_path / "bundle")
    images, label = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(label.size)
    x = (images[order].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    features = {"X": x, "label": label[order].astype(np.int64)}

    def batches(samples: np.ndarray, seed: int) -> list[dict[str, np.ndarray]]:
        rows = np.random.default_rng(seed).permutation(samples).reshape(-1, BATCH)
        return [{name: array[one] for name, array in features.items()} for one in rows]

    test = [{name: array[TRAINED:] for name, array in features.items()}]
    alone = Trainer.load(bundle)
    for number in range(ROUNDS):
        for batch in batches(np.arange(TRAINED), number):
            alone.train_step(batch)
    devices = [Trainer.load(bundle, verify=False) for _ in range(DEVICES)]
    own = np.arange(TRAINED).reshape(DEVICES, -1)
    common = tmp_path / "common.safetensors"
    for number in range(ROUNDS):
        states = []
        for index, device in enumerate(devices):
            for epoch in range(EPOCHS):
                for batch in batches(own[index], number * EPOCHS + epoch):
                    device.train_step(batch)
            device.save_state(tmp_path / "state.safetensors")
            states.append(read_state(tmp_path / "state.safetensors"))
        write_state(replace(average_states(states), path=common), common)
        for device in devices:
            device.load_state(common)
    reached, expected = (one.evaluate(test)["accuracy"] for one in (devices[0], alone))
    assert expected > 0.93
    assert reached > expected - 0.01

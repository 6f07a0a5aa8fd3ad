"""Evaluation, inference and export with the weights that the Python client trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from onward_device import BundleError, Trainer
from tests.device.bundles import BATCH, batches, check_against_onward, samples


def test_steps_are_those_of_onward_train(normalized: Path) -> None:
    changes = {"training": {"weights_not_to_train": ["b1"]}}
    features = samples()
    trainer = check_against_onward(normalized, features, **changes)
    assert (trainer.updates, trainer.skipped_updates) == (50, 0)
    assert {"b1", "b1_exp_avg"}.isdisjoint(trainer.state())
    metrics = trainer.evaluate(batches(features, 7))
    probabilities = trainer.predict({"x": features["x"][: 7 * BATCH]})["logits"].astype(np.float64)
    probabilities -= np.log(np.exp(probabilities).sum(1, keepdims=True))
    label = features["label"][: 7 * BATCH]
    assert metrics["loss"] == pytest.approx(-probabilities[np.arange(label.size), label].mean(), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx((probabilities.argmax(1) == label).mean())
    with pytest.raises(BundleError, match="there are no batches to evaluate"):
        trainer.evaluate(batch for batch in [])


def test_the_exported_file_stands_alone(normalized: Path, tmp_path: Path) -> None:
    trainer = Trainer.load(normalized / "bundle")
    for batch in batches(samples(), 3):
        trainer.train_step(batch)
    trainer.export(tmp_path / "trained.onnx")
    x = samples()["x"]
    (logits,) = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x})
    assert np.abs(logits - trainer.predict({"x": x})["logits"]).max() < 1e-6

"""Graphs of a step, run by the Python client, against `onward train` with the same seed and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward_device import Trainer
from tests.device.bundles import BATCH, batches, bundle_of, samples, sections
from tests.mlp import CROSS_ENTROPY, save_mlp, start


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_changes_nothing_but_counters(bad: float, normalized: Path) -> None:
    trainer = Trainer.load(normalized / "bundle")
    good, spoiled = batches(samples(), 2)
    trainer.train_step(good)
    before = trainer.state()
    with pytest.warns(RuntimeWarning, match="update 2 was skipped"):
        trainer.train_step({**spoiled, "x": spoiled["x"] + np.float32(bad)})
    after = trainer.state()
    assert (trainer.updates, trainer.skipped_updates) == (2, 1)
    counters = ("update_count", "skipped_updates")
    assert all(np.array_equal(after[name], before[name]) for name in before if name not in counters)


def test_accumulation_is_one_batch_though_passes_count_different_labels(tmp_path: Path) -> None:
    """The loss of an update is the mean over all labels of its passes that count, weighed by their classes."""
    save_mlp(tmp_path, normalized=True)
    loss = {**CROSS_ENTROPY, "ignore_index": 3, "class_weights": [1.0, 2.0, 0.5, 1.0]}
    features = samples(48 * BATCH)
    changes: dict[str, Any] = {
        "training": {
            "num_train_steps": 48,
            "gradient_accumulation_steps": 4,
            "weights_not_to_train": ["b1"],
            "mapped_dimensions": {"batch": BATCH},
        },
        "loss": loss,
    }
    bundle = bundle_of(tmp_path, **changes)
    runner, recorder = start(tmp_path, **{**sections(**changes), "loss": loss})
    runner.run(InMemoryDataLoader(dict(features)))
    trainer, losses = Trainer.load(bundle), []
    weights = np.array(loss["class_weights"]) * (np.arange(4) != 3)
    for batch in batches(features, 48):
        losses.append((trainer.train_step(batch), weights[batch["label"]].sum()))
    values, counts = np.array(losses).reshape(-1, 4, 2).transpose(2, 0, 1)
    assert len({*counts[0]}) > 1
    assert ((values * counts).sum(1) / counts.sum(1)).tolist() == pytest.approx(recorder.losses, abs=1e-5)
    assert (trainer.updates, trainer.state()["accumulated_passes"]) == (12, 0)
    for name, weight in runner.net.weights.items():
        assert np.abs(trainer.state()[name] - weight.detach().numpy()).max() < 1e-5, name
    # An update with a pass that is not finite leaves weights and running statistics as they were before all its passes.
    before = trainer.state()
    first, *others = batches(features, 4)
    for batch in ({**first, "x": first["x"] * np.float32(np.inf)}, *others[:-1]):
        trainer.train_step(batch)
    with pytest.warns(RuntimeWarning, match="update 13 was skipped"):
        trainer.train_step(others[-1])
    after = trainer.state()
    assert trainer.skipped_updates == 1
    assert all(np.array_equal(after[n], before[n]) for n in before if n not in ("update_count", "skipped_updates"))


def test_adapters_alone_are_the_state_and_dropout_follows_the_seed(tmp_path: Path) -> None:
    save_mlp(tmp_path, dropout=0.5)
    changes = {
        "adapter": {"rank": 2, "targets": ["w1"]},
        "training": {"seed": 5, "mapped_dimensions": {"batch": BATCH}},
    }
    bundle = bundle_of(tmp_path, **changes, optimizer={"layer_decay": None})
    one, other = Trainer.load(bundle), Trainer.load(bundle)
    weights = [e["name"] for e in one.bundle.manifest["state"] if e["kind"] == "weight"]
    assert len(weights) == 2
    assert not {"w1", "b1", "w2", "b2"} & {*one.state()}
    features = batches(samples(), 4)
    losses = [one.train_step(batch) for batch in features]
    assert [other.train_step(batch) for batch in features] == losses
    again = Trainer.load(bundle)
    again._set_state({**again.state(), "seed": np.array(6)})
    assert [again.train_step(batch) for batch in features] != losses
    one.save_state(bundle / "state.safetensors")
    trained = tmp_path / "trained.onnx"
    state = ["--device-state", str(bundle / "state.safetensors")]
    assert main(["export", str(tmp_path / "mlp.onnx"), *state, "-o", str(trained)]) == 0
    x = samples()["x"]
    (logits,) = onnxruntime.InferenceSession(trained).run(None, {"x": x})
    assert np.abs(logits - one.predict({"x": x})["logits"]).max() < 1e-5
    # The same batch is dropped out otherwise in the next update.
    still = Trainer.load(bundle)
    assert len({still.train_step(features[0]) for _ in range(3)}) == 3


def test_batches_of_one_sample_train_where_a_channel_has_one_value(tmp_path: Path) -> None:
    """The unbiased variance of one value is 0 / 0: running statistics were not finite, and every update was skipped."""
    save_mlp(tmp_path, normalized=True)
    changes: dict[str, Any] = {
        "training": {"batch_size": 1, "num_train_steps": 6, "weights_not_to_train": ["b1"]},
        "learning_rate": {"warmup_steps": 0},
    }
    bundle_of(tmp_path, **changes)
    runner, recorder = start(tmp_path, **sections(**changes))
    features = samples(6)
    runner.run(InMemoryDataLoader(dict(features)))
    trainer = Trainer.load(tmp_path / "bundle")
    losses = [trainer.train_step({name: array[i : i + 1] for name, array in features.items()}) for i in range(6)]
    assert trainer.skipped_updates == 0
    assert losses == pytest.approx(recorder.losses, abs=1e-6)
    state, tensors = trainer.state(), runner.net.tensors_by_name()
    for name in runner.net.graph.states:
        assert np.abs(state[name] - tensors[name].numpy()).max() < 1e-6, name

"""Reference models on a device: the losses of `onward train` over 50 steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward_device import Trainer
from tests.device.reference_runs import RUNS, adapted, bert

SHORT = ("normalized",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.slow]) for name in RUNS]
)
def test_losses_are_those_of_onward_train(name: str, tmp_path: Path) -> None:
    """Evaluation and export, where the optimizer averages, are of the averages."""
    run = RUNS[name]()
    trainer = Trainer.load(run.write(tmp_path))
    runner, expected = run.train(tmp_path)
    losses = run.losses_of_updates([trainer.train_step(batch) for batch in run.batches])
    assert len(losses) == 50 // run.accumulation
    assert losses == pytest.approx(expected, abs=1e-5)
    evaluated = runner.evaluate(InMemoryDataLoader(dict(run.features))).metrics
    for metric, value in trainer.evaluate(run.batches).items():
        assert value == pytest.approx(evaluated[metric], rel=1e-4), metric
    trainer.save_state(tmp_path / "bundle" / "state.safetensors")
    arguments = ["--device-state", str(tmp_path / "bundle" / "state.safetensors"), "-o", str(tmp_path / "trained.onnx")]
    assert main(["export", str(tmp_path / "model.onnx"), *arguments]) == 0
    if name == "normalized":
        return  # the exported graph normalizes by the batch, as the user's own graph does
    inputs = {one["name"]: run.features[one["name"]] for one in trainer._inputs_that_are_features("infer")}
    ours = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(None, dict(inputs))
    for one, (output, other) in zip(ours, trainer.predict(inputs).items(), strict=True):
        assert np.abs(one - other).max() < 1e-4, output


@pytest.mark.slow
def test_the_state_of_adapters_is_small(tmp_path: Path) -> None:
    """Two moments for each number of the adapters, and nothing of the model."""
    run = adapted()
    trainer = Trainer.load(run.write(tmp_path))
    weights = [one for one in trainer.bundle.manifest["state"] if one["kind"] == "weight"]
    sizes = sum(int(np.prod(one["shape"])) * 4 for one in weights)
    model_bytes = (tmp_path / "bundle" / "weights.bin").stat().st_size
    trainer.save_state(tmp_path / "state.safetensors")
    state_bytes = (tmp_path / "state.safetensors").stat().st_size
    assert all("lora" in one["name"].lower() for one in weights), [one["name"] for one in weights]
    assert 3 * sizes <= state_bytes < 3 * sizes + 200 * len(trainer.state()) + 1000
    assert sizes < model_bytes / 4


@pytest.mark.slow
def test_accumulated_passes_of_two_means_are_one_batch(tmp_path: Path) -> None:
    """BERT's masked tokens, of which passes hold different numbers, and its pairs: each counts its own labels."""
    run = bert(training={"gradient_accumulation_steps": 5, "accumulate_as": "one_batch"})
    counted = (run.features["masked_lm_ids"] != 0).reshape(50, -1).sum(1)
    assert len({*counted}) > 2
    trainer = Trainer.load(run.write(tmp_path))
    runner, _ = run.train(tmp_path)
    for batch in run.batches:
        trainer.train_step(batch)
    assert (trainer.updates, trainer.skipped_updates) == (10, 0)
    state = trainer.state()
    for name, weight in runner.net.weights.items():
        assert np.abs(state[name] - weight.detach().numpy()).max() < 1e-5, name
    assert not any(np.any(state[one]) for one in state if one.endswith(("_grad_sum", "_grad_sum_1")))

"""From a device back to the user's graph, and to `onward train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward_device import Trainer
from tests.device.bundles import batches, bundle_of, check_against_onward, samples, sections
from tests.mlp import save_mlp, start


def test_the_way_back_to_the_user_and_to_onward_train(normalized: Path, tmp_path: Path) -> None:
    """A device trains 20 updates; the user's own graph gets its weights, and `onward train` makes the other 30."""
    changes = {"training": {"weights_not_to_train": ["b1"]}}
    features = samples()
    trainer = Trainer.load(normalized / "bundle")
    for batch in batches(features, 20):
        trainer.train_step(batch)
    trainer.save_state(tmp_path / "state.safetensors")
    arguments = ["--device-state", str(tmp_path / "state.safetensors"), "--bundle", str(normalized / "bundle")]
    assert main(["export", str(normalized / "mlp.onnx"), *arguments, "-o", str(tmp_path / "trained.onnx")]) == 0
    before, after = onnx.load(normalized / "mlp.onnx"), onnx.load(tmp_path / "trained.onnx")
    assert before.graph.node == after.graph.node
    (logits,) = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": features["x"]})
    assert np.abs(logits - trainer.predict({"x": features["x"]})["logits"]).max() < 1e-5
    run = ["device", str(normalized / "run.yaml"), "--device-state", str(tmp_path / "state.safetensors")]
    assert main([*run, "--checkpoint.checkpoints_dir", str(tmp_path / "checkpoints")]) == 0
    runner, recorder = start(
        normalized, checkpoint={"checkpoints_dir": tmp_path / "checkpoints"}, **sections(**changes)
    )
    assert runner.resumed_update == 20
    runner.run(
        InMemoryDataLoader(dict(features))
    )  # the device's data are not the run's: it begins with the first batch
    losses = [trainer.train_step(batch) for batch in batches(features, 30)]
    assert losses == pytest.approx(recorder.losses, abs=1e-5)
    assert main([*run, "--checkpoint.checkpoints_dir", str(tmp_path / "checkpoints")]) == 2


@pytest.mark.parametrize(("name", "options"), [("NAdam", {"momentum_decay": 0.1}), ("ASGD", {"lambd": 0.01})])
def test_classes_of_torch_train_and_resume_as_onward_train_does(
    name: str, options: dict[str, float], tmp_path: Path
) -> None:
    """With clipping, a schedule and rates by layer: the losses of 50 steps, and of 30 from a checkpoint of a device."""
    optimizer = {"training_optimizer_name": f"torch.optim.{name}", "optimizer_attributes": [{"options": options}]}
    changes: dict[str, Any] = {"optimizer": optimizer, "learning_rate": {"initial_lr": 0.2}}
    save_mlp(tmp_path)
    bundle_of(tmp_path, **changes)
    features = samples()
    check_against_onward(tmp_path, features, **changes)
    run = ["device", str(tmp_path / "run.yaml"), "--device-state", str(tmp_path / "state.safetensors")]
    for updates in (0, 20):
        trainer = Trainer.load(tmp_path / "bundle")
        for batch in batches(features, updates):
            trainer.train_step(batch)
        trainer.save_state(tmp_path / "state.safetensors")
        checkpoints = tmp_path / f"checkpoints_{updates}"
        assert main([*run, "--checkpoint.checkpoints_dir", str(checkpoints)]) == 0
        runner, recorder = start(tmp_path, checkpoint={"checkpoints_dir": checkpoints}, **sections(**changes))
        assert runner.resumed_update == updates
        runner.run(InMemoryDataLoader(dict(features)))
        losses = [trainer.train_step(batch) for batch in batches(features, 50 - updates)]
        assert losses == pytest.approx(recorder.losses, abs=1e-5)


def test_schedule_free_resumes_from_a_device(tmp_path: Path) -> None:
    """Its point z and the learning rates so far come back, scaled by each weight's own factor."""
    optimizer = {"training_optimizer_name": "AdamWScheduleFree", "max_norm_clip": 0.5, "layer_decay": 0.5}
    changes = {"optimizer": {**optimizer, "optimizer_attributes": []}}
    save_mlp(tmp_path)
    trainer = Trainer.load(bundle_of(tmp_path, **changes))
    features = samples()
    for batch in batches(features, 20):
        trainer.train_step(batch)
    trainer.save_state(tmp_path / "state.safetensors")
    checkpoints = tmp_path / "checkpoints"
    run = ["device", str(tmp_path / "run.yaml"), "--device-state", str(tmp_path / "state.safetensors")]
    assert main([*run, "--checkpoint.checkpoints_dir", str(checkpoints)]) == 0
    runner, recorder = start(tmp_path, checkpoint={"checkpoints_dir": checkpoints}, **sections(**changes))
    assert runner.resumed_update == 20
    runner.run(InMemoryDataLoader(dict(features)))
    losses = [trainer.train_step(batch) for batch in batches(features, 30)]
    assert losses == pytest.approx(recorder.losses, abs=1e-5)
    evaluated = runner.evaluate(InMemoryDataLoader(dict(features))).metrics
    assert trainer.evaluate(batches(features))["loss"] == pytest.approx(evaluated["loss"], abs=1e-5)

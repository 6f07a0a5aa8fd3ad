"""Reference models on a device: the losses of `onward train` over 50 steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import yaml

from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.device.bundle import write_bundle
from onward.graph.writing.model_saving import save_model
from onward.models import create_model
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from onward_device import Trainer
from tests.mlp import ON_ONE_THREAD
from tests.watching import Recorder

pytestmark = pytest.mark.slow
BATCH, STEPS, TOKENS = 2, 50, 8
SMALL = {"layers": 2, "heads": 2, "width": 16, "vocab_size": 40, "dropout": 0.0}
SAMPLES = BATCH * STEPS


def draw(shape: tuple[int, ...], below: int) -> np.ndarray:
    return np.random.default_rng(len(shape) + below).integers(0, below, (SAMPLES, *shape))


def gpt2() -> tuple[Any, dict[str, Any], Mapping[str, np.ndarray], dict[str, int]]:
    model = create_model("gpt2", size="tiny", **SMALL, context_length=TOKENS)
    tokens = draw((TOKENS + 1,), 40)
    loss = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"}
    return model, loss, {"input_ids": tokens[:, :-1], "label": tokens[:, 1:]}, {"batch": BATCH, "sequence": TOKENS}


def bert() -> tuple[Any, dict[str, Any], Mapping[str, np.ndarray], dict[str, int]]:
    model = create_model("bert", size="tiny", **SMALL)
    features = {
        "input1": draw((TOKENS,), 40),
        "input2": draw((TOKENS,), 2),
        "input3": np.ones((SAMPLES, TOKENS), np.int64),
        "masked_lm_positions": draw((3,), TOKENS),
        "masked_lm_ids": draw((3,), 30),
        "next_sentence_labels": draw((), 2),
    }
    return model, {"type": "bert"}, features, {"batch": BATCH, "sequence": TOKENS, "masked": 3}


def mnist() -> tuple[Any, dict[str, Any], Mapping[str, np.ndarray], dict[str, int]]:
    model = create_model("mnist", variant="conv", image_size=12, hidden=16, dropout=0.0)
    images = np.random.default_rng(0).random((SAMPLES, 1, 12, 12), np.float32)
    loss = {"type": "softmax_cross_entropy", "prediction": "predictions", "label": "label"}
    return model, loss, {"X": images, "label": draw((), 10)}, {"batch": BATCH}


@pytest.mark.parametrize(
    ("make", "optimizer"), [(gpt2, "AdamW"), (bert, "AdamW"), (mnist, "AdamW"), (mnist, "AdamWScheduleFree")]
)
def test_losses_are_those_of_onward_train(make: Any, optimizer: str, tmp_path: Path) -> None:
    """Evaluation and export, where the optimizer averages, are of the averages."""
    model, loss, features, sizes = make()
    save_model(model, tmp_path / "model.onnx")
    known = {s for v in model.graph.inputs for s in (v.shape or ()) if not isinstance(s, int)}
    known_names = {str(size.value) for size in known} | ({"masked"} & {*sizes})
    run = {
        "paths": {"model_path": "model.onnx"},
        "loss": loss,
        "training": {
            "batch_size": BATCH,
            "num_train_steps": STEPS,
            "display_loss_steps": 1,
            "mapped_dimensions": {name: size for name, size in sizes.items() if name in known_names},
        },
        "optimizer": {"training_optimizer_name": optimizer, "max_norm_clip": 1.0},
        "learning_rate": {"initial_lr": 1e-3, "warmup_mode": "linear", "warmup_steps": 5},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    trainer = Trainer.load(write_bundle(tmp_path / "run.yaml", tmp_path / "bundle"))
    recorder = Recorder()
    runner = TrainingRunner(Parameters.load(tmp_path / "run.yaml"), ON_ONE_THREAD, [recorder], progress=False)
    runner.initialize()
    runner.run(InMemoryDataLoader(dict(features)))
    batches = [{n: a[i * BATCH : (i + 1) * BATCH] for n, a in features.items()} for i in range(STEPS)]
    assert [trainer.train_step(batch) for batch in batches] == pytest.approx(recorder.losses, abs=1e-5)
    evaluated = runner.evaluate(InMemoryDataLoader(dict(features))).metrics
    for name, value in trainer.evaluate(batches).items():
        assert value == pytest.approx(evaluated[name], rel=1e-4), name
    trainer.save_state(tmp_path / "bundle" / "state.safetensors")
    arguments = ["--device-state", str(tmp_path / "bundle" / "state.safetensors"), "-o", str(tmp_path / "trained.onnx")]
    assert main(["export", str(tmp_path / "model.onnx"), *arguments]) == 0
    inputs = {one["name"]: features[one["name"]] for one in trainer._inputs_that_are_features("infer")}
    ours = onnxruntime.InferenceSession(tmp_path / "trained.onnx").run(None, dict(inputs))
    for one, (name, other) in zip(ours, trainer.predict(inputs).items(), strict=True):
        assert np.abs(one - other).max() < 1e-4, name

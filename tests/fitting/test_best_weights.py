"""A fit that compares evaluations holds, evaluates and exports the weights of the best one, however it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import onward
from onward.engine.callbacks import Callback
from onward.engine.reports import EvaluationReport, UpdateReport
from onward.fitting.result import FitResult
from tests.fitting.test_fit import fit
from tests.mlp import build_mlp, data

TRAIN, TEST = data(40), data(24, seed=3)
STOPPING = {"early_stopping": {"patience": 2}}


class Spoils(Callback):
    """Adds noise to the weights after some updates, so that evaluations get worse; remembers what they were."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_update(self, report: UpdateReport) -> None:
        if report.update > self.after:
            with torch.no_grad():
                for weight in self.control.net.weights.values():
                    weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(report.update)))

    def on_evaluation(self, report: EvaluationReport) -> None:
        now = self.control.net.weights
        self.seen[report.update] = {name: weight.detach().clone() for name, weight in now.items()}


def spoiled(folder: Path | None = None, **options: Any) -> tuple[FitResult, Spoils]:
    spoils = Spoils(10)
    given = {"validation_data": (TEST["x"], TEST["label"]), "epochs": 8, "parameters": STOPPING, "learning_rate": 0.01}
    if folder is not None:
        given["output_dir"] = folder
    return fit((TRAIN["x"], TRAIN["label"]), callbacks=[spoils], **{**given, **options}), spoils


def recorded(folder: Path) -> str:
    """Which weights were written, as the record of the run says."""
    return str(json.loads((folder / "run.json").read_text())["trained_model"]["weights"])


def loss_of(path: Path) -> float:
    """Of an exported file, by onnxruntime."""
    (logits,) = onnxruntime.InferenceSession(path).run(None, {"x": TEST["x"]})
    return float(torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(TEST["label"])))


@pytest.mark.parametrize("normalized", [False, True])
def test_an_early_stopped_fit_holds_the_best_weights(normalized: bool, tmp_path: Path) -> None:
    """Weights bit for bit, running statistics by what they compute; history, metrics and notes say so."""
    result, spoils = spoiled(tmp_path / "out", model=build_mlp(normalized=normalized))
    losses = result.history.evaluations["loss"]
    best = int(np.argmin(losses))
    assert best == len(losses) - 3
    assert result.summary.stopped is not None
    assert result.held_update == result.history.evaluations["update"][best] == 10
    for name, weight in spoils.seen[10].items():
        assert torch.equal(result.runner.net.weights[name], weight), name
        assert torch.equal(result.net.weights[name], weight), name
    assert result.metrics["loss"] == losses[best] == min(losses)
    assert result.evaluate((TEST["x"], TEST["label"]))["loss"] == pytest.approx(min(losses), abs=1e-6)
    assert loss_of(result.export(tmp_path / "exported.onnx")) == pytest.approx(min(losses), abs=1e-6)
    assert loss_of(tmp_path / "out" / "model_trained.onnx") == pytest.approx(min(losses), abs=1e-6)
    said = (
        f"the result holds the weights of the best evaluation (loss {min(losses):.4g} at step 10), not the last ones."
    )
    assert said in result.history.messages
    assert recorded(tmp_path / "out") == f"trained model of the best evaluation (loss {min(losses):.4g} at step 10)"
    assert f"validation loss {min(losses):.4g}" in repr(result)


def test_without_a_comparison_the_last_weights_are_held(tmp_path: Path) -> None:
    result, spoils = spoiled(parameters={})
    last = max(spoils.seen)
    assert result.held_update == last == 40
    assert torch.equal(result.runner.net.weights["w1"], spoils.seen[last]["w1"])
    assert result.metrics["loss"] == result.history.evaluations["loss"][-1]
    assert not [text for text in result.history.messages if "best evaluation" in text]


def test_the_last_weights_are_held_where_they_are_the_best(tmp_path: Path) -> None:
    """Also where they are evaluated only after the last step: steps that end within an epoch."""
    options = {"epochs": None, "steps": 8, "callbacks": [], "learning_rate": 0.05}
    given = {"validation_data": (TRAIN["x"], TRAIN["label"]), "parameters": STOPPING, "output_dir": tmp_path}
    result = fit((TRAIN["x"], TRAIN["label"]), **{**given, **options})
    assert result.history.evaluations["update"] == [5, 8]
    assert result.held_update == 8
    assert result.metrics["loss"] == (least := min(result.history.evaluations["loss"]))
    assert recorded(tmp_path) == f"trained model of the best evaluation (loss {least:.4g} at step 8, the last one)"


@pytest.mark.parametrize("keeps", [True, False])
def test_a_fit_that_resumed_finds_the_best_of_before(keeps: bool, tmp_path: Path) -> None:
    """In its checkpoint, where it was kept; else it says that it is not at hand."""
    folder = tmp_path / "checkpoints"
    settings = {"early_stopping": {"patience": 9}, "checkpoint": {"keep_best": keeps, "checkpoint_period": 5}}
    model = tmp_path / "mlp.onnx"
    onnx.save(build_mlp(), model)
    first, spoils = spoiled(checkpoints_dir=folder, parameters=settings, model=model, epochs=8)
    assert first.held_update == 10
    again = fit(
        (TRAIN["x"], TRAIN["label"]), model=model, checkpoints_dir=folder, parameters=settings, epochs=10,
        validation_data=(TEST["x"], TEST["label"]), callbacks=[Spoils(0)], learning_rate=0.01,
    )  # fmt: skip
    if keeps:
        assert again.held_update == 10
        assert torch.equal(again.runner.net.weights["w1"], spoils.seen[10]["w1"])
    else:
        assert again.held_update == 50
        (said,) = [text for text in again.history.messages if "before this call resumed" in text]
        assert said.endswith("Set checkpoint.keep_best to keep them.")


def test_a_file_of_a_fixed_batch_gives_a_net_for_any(tmp_path: Path) -> None:
    model = build_mlp()
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    result = fit((TRAIN["x"], TRAIN["label"]), model=model, batch_size=8, epochs=1)
    assert result.net(torch.from_numpy(TRAIN["x"])).shape == (40, 4)
    exported = onnx.load(result.export(tmp_path / "exported.onnx"))
    assert exported.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    assert onward.to_torch(exported, any_batch_size=True)(torch.from_numpy(TRAIN["x"])).shape == (40, 4)

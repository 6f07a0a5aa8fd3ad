"""Direct preference optimization: trl's formula, against the model as the run starts, in training and in evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError
from onward.graph.losses.adding import add_loss
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.parameters import Adapter, Parameters
from onward.runner import TrainingRunner
from tests.graph.loss_models import pass_through
from tests.mlp import ON_ONE_THREAD, weights_of
from tests.plan.staged_models import Sketch

WORDS, WIDTH, LENGTH, PAIRS, UPDATES, RATE = 11, 8, 6, 4, 3, 0.5
LOSS: dict[str, Any] = {"type": "dpo", "prediction": "logits", "label": "labels"}


def model(dropout: bool = False) -> ir.Model:
    """A language model of words by their own number alone, with an attention mask that it multiplies by."""
    sketch = Sketch(seed=2)
    ids = sketch.input("input_ids", ["batch", "sequence"], ir.DataType.INT64)
    mask = sketch.input("scale", ["batch", "sequence", 1])
    value = sketch.node("Gather", "embedded", sketch.weight("table", WORDS, WIDTH), ids)
    value = sketch.node("Mul", "scaled", value, mask)
    if dropout:
        value = sketch.node("Dropout", "kept", value, sketch.weight("ratio", array=np.float32(0.5)))
    value = sketch.node("MatMul", "hidden", value, sketch.weight("hidden.weight", WIDTH, WIDTH))
    value = sketch.node(
        "MatMul", "logits", sketch.node("Tanh", "bent", value), sketch.weight("last.weight", WIDTH, WORDS)
    )
    value.shape = ir.Shape(["batch", "sequence", WORDS])
    return sketch.model(value)


def pairs(samples: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    labels = generator.integers(0, WORDS, (samples, 2, LENGTH))
    labels[:, :, :2] = -100
    labels[:, 1, -1] = -100
    return {
        "input_ids": generator.integers(0, WORDS, (samples, 2, LENGTH)),
        "scale": generator.uniform(0.5, 1, (samples, 2, LENGTH, 1)).astype(np.float32),
        "labels": labels,
    }


def weights() -> dict[str, torch.Tensor]:
    stored = {name: value.const_value for name, value in model().graph.initializers.items()}
    return {
        name: torch.from_numpy(one.numpy().copy()).requires_grad_() for name, one in stored.items() if one is not None
    }


def log_probabilities(held: dict[str, torch.Tensor], batch: dict[str, np.ndarray]) -> torch.Tensor:
    """Of both answers of each pair, as trl has it: the sum over the tokens that are not ignored."""
    ids, scale, labels = (torch.from_numpy(batch[name]) for name in ("input_ids", "scale", "labels"))
    logits = torch.tanh(held["table"][ids] * scale @ held["hidden.weight"]) @ held["last.weight"]
    counted = labels != -100
    found = logits.log_softmax(-1).gather(-1, torch.where(counted, labels, 0)[..., None])[..., 0]
    return (found * counted).sum(-1)


def dpo(policy: torch.Tensor, reference: torch.Tensor, beta: float, smoothing: float) -> torch.Tensor:
    """`DPOTrainer.dpo_loss` of trl, loss_type sigmoid, before the mean."""
    logits = (policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1])
    return -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing


def run(folder: Path, loss: dict[str, Any], data: dict[str, np.ndarray], **sections: Any) -> tuple[Any, Any]:
    ir.save(model(sections.pop("dropout", False)), folder / "model.onnx")
    asked = Parameters.from_mapping(
        {
            "paths": {"model_path": folder / "model.onnx"},
            "loss": {**LOSS, **loss},
            "training": {"batch_size": PAIRS, "num_train_steps": UPDATES, **sections.pop("training", {})},
            "learning_rate": {"initial_lr": RATE},
            "optimizer": {"training_optimizer_name": "SGDOptimizer"},
            **sections,
        }
    )
    runner, loader = TrainingRunner(asked, ON_ONE_THREAD), InMemoryDataLoader(data)
    runner.initialize(loader.feature_specs())
    before = dict(runner.evaluate(loader).metrics)
    runner.run(loader)
    return runner, (before, dict(runner.evaluate(loader).metrics))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.2)])
def test_training_is_trls(beta: float, smoothing: float, reduction: str, tmp_path: Path) -> None:
    """Weights to 1e-5 after updates that change them much more; loss, rewards and accuracy of evaluations to 1e-6."""
    data = pairs(PAIRS * UPDATES)
    loss = {"dpo_beta": beta, "label_smoothing": smoothing, "reduction": reduction}
    runner, (before, after) = run(tmp_path, loss, data)
    held, start = weights(), {name: one.detach() for name, one in weights().items()}
    for first in range(0, PAIRS * UPDATES, PAIRS):
        batch = {name: array[first : first + PAIRS] for name, array in data.items()}
        costs = dpo(log_probabilities(held, batch), log_probabilities(start, batch), beta, smoothing)
        (costs.mean() if reduction == "mean" else costs.sum()).backward()
        with torch.no_grad():
            for one in held.values():
                assert one.grad is not None
                one -= RATE * one.grad
                one.grad = None
    trained = weights_of(runner)
    for name, one in held.items():
        torch.testing.assert_close(trained[name], one.detach(), rtol=0, atol=1e-5)
        assert (one - start[name]).abs().max() > 1e-3
    assert before["loss"] == pytest.approx(np.log(2), rel=1e-6)
    gained = beta * (log_probabilities(held, data) - log_probabilities(start, data)).detach()
    costs = dpo(log_probabilities(held, data), log_probabilities(start, data), beta, smoothing).detach()
    assert after["loss"] == pytest.approx(costs.mean().item(), rel=1e-5)
    assert after["chosen_reward"] == pytest.approx(gained[:, 0].mean().item(), rel=1e-4)
    assert after["rejected_reward"] == pytest.approx(gained[:, 1].mean().item(), rel=1e-4)
    assert after["preference_accuracy"] == (gained[:, 0] > gained[:, 1]).float().mean().item()


def test_log_probabilities_of_the_data_are_the_reference(tmp_path: Path) -> None:
    """Given those of the model as it starts, the run is the same; and no copy of the model is computed."""
    data = pairs(PAIRS * UPDATES)
    first, _ = run(tmp_path, {}, data)
    given = {**data, "reference": log_probabilities(weights(), data).detach().numpy()}
    second, _ = run(tmp_path, {"reference_log_probabilities": "reference"}, given)
    for name, one in weights_of(second).items():
        if not name.startswith("loss/"):
            torch.testing.assert_close(one, weights_of(first)[name], rtol=0, atol=1e-6)
    assert not any("reference/" in str(node.name) for node in second.graph.model.graph)


def other_model(output: str = "logits", words: int = WORDS) -> ir.Model:
    """A reference of its own shape: embeddings that are logits, in another opset, which reads the ids alone."""
    sketch = Sketch(seed=7)
    ids = sketch.input("input_ids", ["batch", "sequence"], ir.DataType.INT64)
    value = sketch.node("Gather", output, sketch.weight("table", WORDS, words), ids)
    value.shape = ir.Shape(["batch", "sequence", words])
    made = sketch.model(value)
    made.graph.opset_imports[""] = 17
    return made


def test_the_reference_shares_what_does_not_train() -> None:
    spec = LossSpec(**LOSS)
    graph = make_training_graph(model(), loss=spec, weights_to_train=["last.weight"])
    copies = {name for name in graph.model.graph.initializers if "reference/" in name}
    assert copies == {"loss/reference/last.weight"}
    assert graph.weights == ("last.weight",)
    assert not any("reference/" in name and name not in copies for name in graph.frozen)


@pytest.mark.parametrize("start", ["kaiming", "pissa"])
def test_with_adapters_the_reference_is_the_base(start: Any, tmp_path: Path) -> None:
    """Which it shares, but for weights whose values adapters took over; the adapters train away from it."""
    adapter = Adapter(rank=2, targets=("hidden.weight", "last.weight"), start=start)
    graph = make_training_graph(model(), loss=LossSpec(**LOSS), adapter=adapter)
    copies = {name for name in graph.model.graph.initializers if "reference/" in name}
    changed = {f"loss/reference/{name}" for name in ("hidden.weight", "last.weight")} if start == "pissa" else set()
    assert copies == changed
    assert all(".lora_" in name for name in graph.weights)
    section = {"rank": 2, "targets": ["hidden.weight", "last.weight"], "start": start}
    _, (before, after) = run(tmp_path, {}, pairs(PAIRS * UPDATES), adapter=section)
    assert before["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert after["loss"] < before["loss"] - 1e-4


def test_the_reference_has_no_dropout(tmp_path: Path) -> None:
    """In training mode as well: the first loss of a model with dropout is not log 2, the reference being exact."""
    data = pairs(PAIRS * UPDATES)
    runner, (before, _) = run(tmp_path, {}, data, dropout=True)
    assert before["loss"] == pytest.approx(np.log(2), rel=1e-6)
    kinds = [node.op_type for node in runner.graph.model.graph if "reference/" in str(node.name)]
    assert kinds
    assert "Dropout" not in kinds


@pytest.mark.parametrize(
    ("opset", "shape", "words"),
    [
        (11, ["batch", "sequence", 5], "'dpo' needs opset 12 or newer, and the model has 11. Convert it"),
        (18, [2, 4, 5], r"input 'y_in' is \[2, 4, 5\]; expected a batch of any size first. Export the model"),
        (18, ["batch", 5], r"'y' is \[batch, 5\]; expected 3 axes"),
    ],
)
def test_models_that_do_not_fit(opset: int, shape: list[Any], words: str) -> None:
    loaded = ir.from_proto(pass_through(opset, {"y": shape}))
    with pytest.raises(ModelError, match=words):
        add_loss(loaded, LossSpec(type="dpo", prediction="y", label="t"))

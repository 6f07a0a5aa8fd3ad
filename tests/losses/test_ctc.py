"""Text recognizers trained with the CTC loss: the same weights as torch gives, in every form of prediction and run."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onward.artifacts.training_graph import write_training_graph
from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import feature_ranges, read_training_graph
from onward.engine.forecast.performance import synthetic_loader
from onward.errors import DataError, ModelError, NodeError, ParametersError
from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.artifacts.plain_runtime import call, largest_error, open_session
from tests.mlp import ON_ONE_THREAD, weights_of
from tests.proposal.kinds import perceptron
from tests.proposal.recognizers import Recognizer, digit_strings, recognizer

BATCH, UPDATES, RATE = 8, 4, 0.05


def digits(folder: Path, samples: int = BATCH * UPDATES) -> dict[str, np.ndarray]:
    return dict(np.load(folder / digit_strings(samples=samples)(folder)))


def parameters(folder: Path, loss: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Parameters:
    training = {"batch_size": BATCH, "num_train_steps": UPDATES, **sections.pop("training", {})}
    return Parameters.from_mapping(
        {
            "paths": {"model_path": str(folder / "net.onnx")},
            "loss": {"type": "ctc", "prediction": "scores", "label": "text", **(loss or {})},
            "optimizer": {"training_optimizer_name": "SGDOptimizer"},
            "learning_rate": {"initial_lr": RATE},
            "training": {**training, "eval_batch_size": 5},
            **sections,
        }
    )


def trained(asked: Parameters, data: dict[str, np.ndarray]) -> tuple[TrainingRunner, dict[str, float]]:
    """The run, and what it says of its own data."""
    runner, loader = TrainingRunner(asked, ON_ONE_THREAD), InMemoryDataLoader(data)
    runner.initialize(loader.feature_specs())
    runner.run(loader)
    return runner, dict(runner.evaluate(loader).metrics)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("end", "options"),
    [((), {}), ((nn.LogSoftmax(-1),), {"time_first": True}), ((nn.Softmax(-1),), {}), ((), {"recurrent": True})],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_training_is_torchs(
    accumulation: int, end: tuple[nn.Module, ...], options: dict[str, Any], reduction: str, tmp_path: Path
) -> None:
    recognizer(*end, **options)(tmp_path)
    torch.manual_seed(0)
    net = Recognizer(**options)
    data = digits(tmp_path)
    training = {
        "batch_size": BATCH // accumulation,
        "num_train_steps": UPDATES * accumulation,
        "gradient_accumulation_steps": accumulation,
    }
    rate = {"learning_rate": {"initial_lr": RATE if reduction == "mean" else RATE / 100}}
    runner, metrics = trained(parameters(tmp_path, {"reduction": reduction}, training=training, **rate), data)

    def loss_of(rows: slice, reduction: str) -> torch.Tensor:
        scores = net(torch.from_numpy(data["image"][rows]))
        scores = scores if net.time_first else scores.transpose(0, 1)
        labels = torch.from_numpy(data["text"][rows])
        counts = (labels >= 0).sum(1)
        steps = torch.full_like(counts, scores.shape[0])
        targets = labels[labels >= 0]
        return F.ctc_loss(scores.log_softmax(-1), targets, steps, counts, reduction=reduction, zero_infinity=True)

    optimizer = torch.optim.SGD(net.parameters(), lr=rate["learning_rate"]["initial_lr"])
    for update in range(UPDATES):
        optimizer.zero_grad()
        loss_of(slice(update * BATCH, (update + 1) * BATCH), reduction).backward()
        optimizer.step()
    values = weights_of(runner)
    names = [name for name, _ in net.named_parameters() if name in values]
    assert len(names) >= 4
    for name in names:
        torch.testing.assert_close(values[name], net.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        wanted = float(loss_of(slice(None), reduction))
    assert metrics["loss"] == pytest.approx(wanted if reduction == "mean" else wanted / len(data["text"]), rel=1e-5)
    assert metrics["sequence_accuracy"] == accuracy(net, data)


def accuracy(net: Recognizer, data: dict[str, np.ndarray]) -> float:
    with torch.no_grad():
        best = net(torch.from_numpy(data["image"])).argmax(-1).numpy()
    best = best.T if net.time_first else best
    decoded = [[one for one, _ in itertools.groupby(row) if one] for row in best.tolist()]
    texts = [[one for one in text if one > 0] for text in data["text"].tolist()]
    return float(np.mean([row == text for row, text in zip(decoded, texts, strict=True)]))


def test_gradients_are_torchs_and_lengths_count(tmp_path: Path) -> None:
    recognizer(width=True)(tmp_path)
    data = digits(tmp_path, BATCH)
    spec = LossSpec(type="ctc", prediction="scores", label="text", prediction_lengths="columns_used")
    net = OnnxModule(make_training_graph(str(tmp_path / "net.onnx"), loss=spec))
    torch.manual_seed(0)
    module = Recognizer()
    image, text = torch.from_numpy(data["image"]), torch.from_numpy(data["text"])
    steps = torch.arange(13, 13 + BATCH).clamp(max=20)
    values = net(image=image, text=text, columns_used=steps)
    loss = dict(zip(net.program.outputs, values, strict=True))["loss"]
    loss.backward()
    scores = module(image).transpose(0, 1).log_softmax(-1)
    wanted = F.ctc_loss(scores, text[text > 0], steps, (text > 0).sum(1))
    wanted.backward()
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    named = {name: one.grad for name, one in module.named_parameters() if name in net.weights}
    assert len(named) >= 4
    for name, gradient in named.items():
        torch.testing.assert_close(net.weights[name].grad, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"blank": 11}, "11] has 11 classes on axis 2; expected 0 to 10"),
        ({"time_axis": 2}, "loss.time_axis and loss.class_axis are both axis 2; give two different axes"),
        ({"time_axis": 3}, "loss.time_axis is 3, but 'scores' has three axes for the CTC loss; expected -3 to 2"),
        ({"label": None}, "loss.type is 'ctc', but loss.label is missing"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    recognizer()(tmp_path)
    given = {"prediction": "scores", "label": "text", **fields}
    with pytest.raises(ModelError, match=re.escape(words)):
        make_training_graph(str(tmp_path / "net.onnx"), loss=LossSpec(type="ctc", **given))


def test_a_prediction_of_two_axes_is_refused(tmp_path: Path) -> None:
    perceptron(5, 3)(tmp_path)
    words = r"'out' is \[batch, 3\]; the CTC loss expects three axes, as \[batch, time, classes\]"
    with pytest.raises(ModelError, match=words):
        make_training_graph(str(tmp_path / "net.onnx"), loss=LossSpec(type="ctc", prediction="out", label="text"))


def test_labels_that_are_too_long_end_the_run_if_asked_for(tmp_path: Path) -> None:
    recognizer()(tmp_path)
    data = digits(tmp_path)
    data["text"] = np.full((len(data["text"]), 30), 3)
    words = "sample 0 of the batch: CTC: a sample has 30 labels and 29 repeated in a row, .* only 20 time steps for it"
    with pytest.raises(NodeError, match=words):
        trained(parameters(tmp_path, {"zero_infinity": False}), data)
    with pytest.warns(UserWarning, match="it counts as a loss of 0"):
        _, metrics = trained(parameters(tmp_path), data)
    assert metrics["loss"] == 0


def test_the_wrong_time_axis_is_found(tmp_path: Path) -> None:
    recognizer()(tmp_path)
    with pytest.raises(NodeError, match=r"20 samples of 8 time steps.*set loss.time_axis"):
        trained(parameters(tmp_path, {"time_axis": 0}), digits(tmp_path))


def test_a_label_out_of_range_is_named(tmp_path: Path) -> None:
    recognizer()(tmp_path)
    data = digits(tmp_path)
    data["text"][3, 0] = 11
    with pytest.raises(DataError, match=r"feature 'text' holds the label 11; expected 0 to 10 or -1"):
        trained(parameters(tmp_path), data)


def test_files_that_onnx_has_no_operators_for_are_refused(tmp_path: Path) -> None:
    recognizer()(tmp_path)
    spec = LossSpec(type="ctc", prediction="scores", label="text")
    for field in ("model_with_loss_func_path", "model_with_training_graph_path"):
        words = f"loss.type is 'ctc', for which ONNX has no operator, so that paths.{field} cannot be written"
        with pytest.raises(ParametersError, match=words):
            parameters(tmp_path, paths={"model_path": tmp_path / "net.onnx", field: tmp_path / "other.onnx"})
    with pytest.raises(ParametersError, match=r"set speed.cuda_graphs: false"):
        parameters(tmp_path, speed={"cuda_graphs": True})
    with pytest.raises(ModelError, match="the model with its loss is no ONNX file"):
        write_model_with_loss(str(tmp_path / "net.onnx"), spec, tmp_path / "other.onnx")
    net = OnnxModule(make_training_graph(str(tmp_path / "net.onnx"), loss=spec))
    with pytest.raises(ModelError, match=r"ONNX has none for loss.type 'ctc'. Train this model with `onward train`"):
        write_training_graph(net, tmp_path / "other.onnx")


@pytest.mark.parametrize("blank", [0, 5, 10])
def test_synthetic_labels_hold_no_blank(blank: int, tmp_path: Path) -> None:
    recognizer()(tmp_path)
    asked = parameters(tmp_path, {"blank": blank}, training={"is_perf_test": True})
    graph = read_training_graph(asked)
    loader = synthetic_loader(asked, graph, {"batch": 4, "label_length": 4}, feature_ranges(asked.loss, graph))
    labels = next(iter(loader.batches(4))).features["text"]
    assert labels.shape == (4, 4)
    assert ((labels >= 0) & (labels < 11) & (labels != blank)).all()


def test_the_weight_update_is_written_beside_ctc(tmp_path: Path) -> None:
    """It reads gradients, wherever they come from: ONNX lacks an operator for the loss only."""
    recognizer()(tmp_path)
    paths = {"model_path": str(tmp_path / "net.onnx"), "optimizer_graph_path": str(tmp_path / "update.onnx")}
    runner, _ = trained(parameters(tmp_path, paths=paths), digits(tmp_path))
    weights = {name: weight.detach() for name, weight in runner.net.weights.items()}
    gradients = {f"{name}_grad": torch.randn_like(weight) for name, weight in weights.items()}
    feeds = {**weights, **gradients, "learning_rate": torch.tensor(0.5), "update_count": torch.tensor(0)}
    updated = call(open_session(tmp_path / "update.onnx"), feeds)
    for name, weight in weights.items():
        assert largest_error(updated[f"{name}_new"], weight - 0.5 * gradients[f"{name}_grad"]) < 1e-6

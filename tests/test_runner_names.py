"""What a run names must be there and fit: dimensions, features, labels, tensors to watch, weights to train."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import watched_names
from onward.errors import DataError, ModelError, NodeError, ParametersError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.models import create_model
from onward.parameters import TensorBoard
from tests.mlp import (
    CROSS_ENTROPY,
    assert_same_bits,
    batches_of,
    data,
    forward,
    save_mlp,
    start,
    weights,
    weights_of,
)

TRAIN = data(32)


def loader(features: dict[str, np.ndarray] = TRAIN, **options: Any) -> InMemoryDataLoader:
    return InMemoryDataLoader(features, **options)


def test_values_of_the_graph_are_told_from_weights() -> None:
    model = create_model("gpt2", size="tiny", layers=1, heads=2, width=16, vocab_size=32, context_length=8)
    graph = make_training_graph(model, loss=LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels"))
    board = TensorBoard(histogram_names=("h.0.mlp.c_fc.weight_grad",), scalar_names=("h.0/Add_output", "wte.weight"))
    assert watched_names(board, graph).values == ("h.0/Add_output",)
    assert watched_names(dataclasses.replace(board, scalar_names=("wte.weight",)), graph).values == ()


def test_mapped_dimensions(tmp_path: Path) -> None:
    unknown = r"^mapped_dimensions names 'rows'; the symbolic dimensions of the model's inputs are: batch\.$"
    with pytest.raises(ParametersError, match=unknown):
        start(tmp_path, training={"mapped_dimensions": {"rows": 4}})
    runner, _ = start(tmp_path)
    with pytest.raises(ParametersError, match=unknown):
        runner.run(loader(), mapped_dimensions={"rows": 4})
    wrong = r"^feature 'x' has shape \[4, 6\] \(batch axis first\); the model expects \[5, 6\]\. Only axes of size 1"
    with pytest.raises(DataError, match=wrong):
        runner.run(loader(), mapped_dimensions={"batch": 5})
    mapped, _ = start(tmp_path, training={"mapped_dimensions": {"batch": 5}})
    with pytest.raises(DataError, match=wrong):
        mapped.run(loader())
    mapped.run(loader(), mapped_dimensions={"batch": 4})


def test_data_that_do_not_fit_the_model(tmp_path: Path) -> None:
    runner, _ = start(tmp_path)
    cases: list[tuple[dict[str, np.ndarray], str]] = [
        (
            {**TRAIN, "x": TRAIN["x"][:, :5]},
            r"^feature 'x' has shape \[5\] per sample; the model expects \[6\]\. Only axes of size 1",
        ),
        (
            {**TRAIN, "x": TRAIN["x"].astype(np.complex64)},
            r"^feature 'x' is complex64 in the data; the model expects float32",
        ),
        (
            {"y": TRAIN["x"], "label": TRAIN["label"]},
            r"^the data have no feature 'x', which the model or its loss reads; they have 'y', 'label'\.",
        ),
        ({**TRAIN, "label": TRAIN["x"][:, 0]}, r"^feature 'label' is float32 in the data; the model expects int64"),
    ]
    for features, words in cases:
        with pytest.raises(DataError, match=words):
            runner.run(loader(features))


def test_test_data_that_do_not_fit_are_told_before_the_first_step(tmp_path: Path) -> None:
    runner, recorder = start(tmp_path, training={"evaluation_period": 4})
    for features, words in (
        (
            {**TRAIN, "x": TRAIN["x"][:, :5]},
            r"^feature 'x' has shape \[5\] per sample; the model expects \[6\]\. Only axes of size 1",
        ),
        ({**TRAIN, "x": TRAIN["x"] > 0}, r"^feature 'x' is bool in the data; the model expects float32"),
        ({"x": TRAIN["x"]}, r"^the data have no feature 'label', which the model or its loss reads; they have 'x'\."),
    ):
        with pytest.raises(DataError, match=words):
            runner.run(loader(), loader(features))
    assert recorder.steps == []


@pytest.mark.parametrize(("ignored", "words"), [(None, ""), (-1, " or -1, which does not count")])
def test_a_label_out_of_range(tmp_path: Path, ignored: int | None, words: str) -> None:
    """Said with its place, in training and in evaluation, before anything is computed."""
    label = TRAIN["label"].copy()
    label[:4] = [0, 7, -2, 3]
    runner, _ = start(tmp_path, loss={**CROSS_ENTROPY, "ignore_index": ignored})
    before = weights_of(runner)
    for use in (runner.run, runner.evaluate):
        with pytest.raises(DataError) as caught:
            use(loader({**TRAIN, "label": label}))
        assert str(caught.value) == (
            f"feature 'label' holds the label 7; expected 0 to 3{words}, since the model has 4 classes. 2 of the 4 "
            "labels of this batch are out of range, the first at [1] (sample first), sample 1 of the data in "
            "memory. Fix the data, or set loss.ignore_index."
        )
    assert_same_bits(weights_of(runner), before)


def test_labels_of_as_many_classes_as_the_network_turns_out_to_have(tmp_path: Path) -> None:
    """A model that leaves the number of classes open is checked where the loss is computed."""
    model = onnx.load(save_mlp(tmp_path))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "classes"
    onnx.save(model, tmp_path / "mlp.onnx")
    runner, _ = start(tmp_path)
    with pytest.raises(NodeError, match=r"label 9 is out of range for 4 classes \(0 to 3; no label is ignored\)"):
        runner.run(loader({**TRAIN, "label": TRAIN["label"] + 9 - TRAIN["label"][0]}))


@pytest.mark.parametrize("field", ["scalar_names", "histogram_names", "norm_names"])
def test_tensorboard_names_must_exist(tmp_path: Path, field: str) -> None:
    with pytest.raises(ParametersError) as caught:
        start(tmp_path, tensorboard={field: ["w1", "w3", "*", "w9*", "w2_grad", "logits", "w1_gradient"]})
    assert str(caught.value) == (
        "tensorboard names 'w3', 'w1_gradient': neither a value of the graph, nor a weight, nor the gradient of one "
        "(`<weight>_grad`)."
    )


def test_tensors_asked_for_by_name_are_in_the_reports(tmp_path: Path) -> None:
    runner, recorder = start(
        tmp_path, tensorboard={"scalar_names": ["logits"], "histogram_names": ["w*"], "norm_names": ["b2_grad"]}
    )
    runner.run(loader())
    first = recorder.steps[0].tensors
    assert set(first) == {"logits", "w1", "w2", "w1_grad", "w2_grad", "b2_grad"}
    np.testing.assert_array_equal(first["w1"].numpy(), weights()["w1"])
    batch = next(batches_of(TRAIN, 4))
    np.testing.assert_allclose(first["logits"].numpy(), forward(batch["x"], weights()), atol=1e-6)
    residuals = np.exp(forward(batch["x"], weights()))
    residuals /= residuals.sum(axis=1, keepdims=True)
    residuals[np.arange(4), batch["label"]] -= 1
    np.testing.assert_allclose(first["b2_grad"].numpy(), residuals.mean(axis=0), atol=1e-6)
    assert not torch.equal(recorder.steps[1].tensors["w1"], first["w1"])


# --------------------------------------------------------------------------------------- which weights, what loss


@pytest.mark.parametrize(
    ("choice", "trained"),
    [
        ({}, {"w1", "b1", "w2", "b2"}),
        ({"weights_to_train": ["w2", "b*"]}, {"w2", "b1", "b2"}),
        ({"weights_not_to_train": ["*1"]}, {"w2", "b2"}),
        ({"weights_to_train": ["w*"], "weights_not_to_train": ["w1"]}, {"w2"}),
    ],
)
def test_exactly_the_chosen_weights_train(tmp_path: Path, choice: dict[str, Any], trained: set[str]) -> None:
    runner, _ = start(tmp_path, training=choice, optimizer={"training_optimizer_name": "AdamW"})
    before = weights_of(runner)
    runner.run(loader())
    after = weights_of(runner)
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained
    assert set(runner.net.weights) == trained


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"^training.weights_to_train: 'v1' matches none of the model's 4 float initializers; did"
    ):
        start(tmp_path, training={"weights_to_train": ["v1"]})
    with pytest.raises(
        ParametersError,
        match=r"^The model has no trainable weights.* 4 x listed in weights_not_to_train .* Change training",
    ):
        start(tmp_path, training={"weights_not_to_train": ["*"]})


def test_immutable_weights_of_the_parameters_reach_the_graph(tmp_path: Path) -> None:
    """A rank-0 weight trains when it is asked for by name, unless the original's rule names its value and place."""
    model = onnx.load(save_mlp(tmp_path))
    model.graph.node[0].output[0] = "unscaled"
    model.graph.node.insert(1, onnx.helper.make_node("Mul", ["unscaled", "gain"], ["h1"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(2.0, np.float32), "gain"))
    onnx.save(model, tmp_path / "mlp.onnx")
    names = ["gain", "w1", "w2", "b1", "b2"]
    runner, _ = start(tmp_path, training={"weights_to_train": names})
    assert set(runner.net.weights) == set(names)
    runner, _ = start(tmp_path, training={"weights_to_train": names, "immutable_weights": {"Mul": [[1, 2.0]]}})
    assert set(runner.net.weights) == set(names) - {"gain"}
    runner, _ = start(tmp_path, training={"weights_to_train": names, "immutable_weights": {"Mul": [[1, 3.0]]}})
    assert set(runner.net.weights) == set(names)


def test_the_model_with_its_loss_is_written(tmp_path: Path) -> None:
    """onnxruntime computes from it the loss that training begins with."""
    path = tmp_path / "with_loss.onnx"
    runner, recorder = start(tmp_path, paths={"model_with_loss_func_path": path})
    onnx.checker.check_model(path, full_check=True)
    batch = next(batches_of(TRAIN, 4))
    session = onnxruntime.InferenceSession(path)
    loss = session.run(["loss"], {"x": batch["x"], "label": batch["label"]})[0]
    runner.run(loader())
    assert recorder.losses[0] == pytest.approx(float(loss), rel=1e-6)

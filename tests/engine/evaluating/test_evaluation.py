"""Evaluation gives what one batch of the entire test set would give, whatever its batches; numpy computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.evaluating.evaluation import _read_evaluation_graph
from onward.errors import ParametersError
from onward.parameters import Parameters
from tests.mlp import (
    CROSS_ENTROPY,
    SQUARES,
    cross_entropies,
    data,
    forward,
    save_mlp,
    start,
    weights,
    weights_of,
)

TRAIN = data(32)
TEST = data(11, seed=1)


def loader(features: dict[str, np.ndarray] = TRAIN, **options: Any) -> InMemoryDataLoader:
    return InMemoryDataLoader(features, **options)


@pytest.mark.parametrize("size", [1, 3, 11, 16])
def test_evaluation_is_the_mean_over_the_whole_test_set(tmp_path: Path, size: int) -> None:
    """Whatever the size of its batches and of the last, short one: loss and accuracy by numpy."""
    runner, _ = start(tmp_path, training={"eval_batch_size": size})
    report = runner.evaluate(loader(TEST))
    logits = forward(TEST["x"], weights())
    assert report.samples == 11
    assert report.metrics["loss"] == pytest.approx(cross_entropies(logits, TEST["label"]).mean(), rel=1e-6)
    assert report.metrics["accuracy"] == (logits.argmax(axis=1) == TEST["label"]).mean()
    assert list(report.metrics) == ["loss", "accuracy"]


def test_evaluation_of_a_loss_without_classes(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, loss=SQUARES, training={"eval_batch_size": 4})
    expected = ((forward(TEST["x"], weights()) - TEST["target"]) ** 2).mean()
    assert runner.evaluate(loader(TEST)).metrics == {"loss": pytest.approx(expected, rel=1e-6)}


def test_evaluation_of_a_sum_is_the_mean_over_samples(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, loss={**SQUARES, "reduction": "sum"}, training={"eval_batch_size": 4})
    expected = ((forward(TEST["x"], weights()) - TEST["target"]) ** 2).sum() / 11
    assert runner.evaluate(loader(TEST)).metrics == {"loss": pytest.approx(expected, rel=1e-6)}


@pytest.mark.parametrize("class_weights", [None, [0.5, 1.0, 2.0, 4.0]])
def test_evaluation_with_labels_that_do_not_count(tmp_path: Path, class_weights: list[float] | None) -> None:
    """Batches with different numbers of labels that count, one of them none at all, weigh accordingly."""
    label = TEST["label"].copy()
    label[[0, 1, 2, 5, 10]] = -1
    loss = {**CROSS_ENTROPY, "ignore_index": -1, "class_weights": class_weights}
    runner, _ = start(tmp_path, loss=loss, training={"eval_batch_size": 3})
    logits, counted = forward(TEST["x"], weights()), label != -1
    shares = (np.ones(4) if class_weights is None else np.array(class_weights))[label[counted]]
    expected = (cross_entropies(logits[counted], label[counted]) * shares).sum() / shares.sum()
    metrics = runner.evaluate(loader({**TEST, "label": label})).metrics
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["accuracy"] == (logits[counted].argmax(axis=1) == label[counted]).mean()


def test_separate_evaluation_model(tmp_path: Path) -> None:
    """Its own graph, here without the bias, reads the trained weights by name."""
    model = onnx.load(save_mlp(tmp_path, dropout=0.5))
    model.graph.node[-1].input[2] = ""
    del model.graph.initializer[[t.name for t in model.graph.initializer].index("b2")]
    for tensor in model.graph.initializer:
        if tensor.name.startswith("w"):
            tensor.raw_data = bytes(len(tensor.raw_data))  # what the file holds must not matter
    onnx.save(model, tmp_path / "eval.onnx")
    runner, _ = start(tmp_path, paths={"eval_model_path": tmp_path / "eval.onnx"})
    runner.run(loader(), loader(TEST))
    report = runner.end_training(loader(TEST))
    trained = {**weights_of(runner), "b2": np.zeros(4)}
    assert report is not None
    expected = cross_entropies(forward(TEST["x"], trained), TEST["label"]).mean()
    assert report.metrics["loss"] == pytest.approx(expected, rel=1e-6)


def test_separate_evaluation_model_with_other_weights(tmp_path: Path) -> None:
    model = onnx.load(save_mlp(tmp_path))
    for value in (*model.graph.initializer, *model.graph.node):
        if isinstance(value, onnx.TensorProto) and value.name in ("w1", "b1"):
            value.name = f"other.{value.name}"
    model.graph.node[0].input[1:] = ["other.w1", "other.b1"]
    onnx.save(model, tmp_path / "eval.onnx")
    with pytest.raises(ParametersError) as caught:
        start(tmp_path, paths={"eval_model_path": tmp_path / "eval.onnx"})
    assert str(caught.value) == (
        f"paths.eval_model_path: 2 of the weights of '{tmp_path}/eval.onnx' are not in the trained model, or not with "
        "that shape: 'other.b1', 'other.w1'. Both graphs must name their weights alike."
    )


def test_separate_evaluation_model_with_another_shape(tmp_path: Path) -> None:
    model = onnx.load(save_mlp(tmp_path))
    model.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(np.zeros(1, np.float32), "b1"))
    onnx.save(model, tmp_path / "eval.onnx")
    with pytest.raises(ParametersError, match=r"1 of the weights of .* not with that shape: 'b1'\."):
        start(tmp_path, paths={"eval_model_path": tmp_path / "eval.onnx"})


def build_two_heads() -> onnx.ModelProto:
    """A table of 5 logits for each of 5 tokens, and one of 2 for the first token of each sentence."""
    generator = np.random.default_rng(3)
    tables = {"words": generator.standard_normal((5, 5)), "pairs": generator.standard_normal((5, 2))}
    tables["zero"] = np.array(0)
    tensors = [
        onnx.numpy_helper.from_array(t.astype(np.float32 if t.ndim else np.int64), name) for name, t in tables.items()
    ]
    nodes = [
        onnx.helper.make_node("Gather", ["words", "ids"], ["output1"]),
        onnx.helper.make_node("Gather", ["ids", "zero"], ["first"], axis=1),
        onnx.helper.make_node("Gather", ["pairs", "first"], ["output2"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "two_heads",
        [onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch", "sequence"])],
        [
            onnx.helper.make_tensor_value_info("output1", onnx.TensorProto.FLOAT, ["batch", "sequence", 5]),
            onnx.helper.make_tensor_value_info("output2", onnx.TensorProto.FLOAT, ["batch", 2]),
        ],
        tensors,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_evaluation_of_a_bert_loss(tmp_path: Path, size: int) -> None:
    """Masked words are a mean over masked words (id 0 is padding), pairs one over sentences; the loss is their sum."""
    model = build_two_heads()
    onnx.save(model, tmp_path / "mlp.onnx")
    words, pairs = (onnx.numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer[:2])
    generator = np.random.default_rng(5)
    ids, positions = generator.integers(0, 5, (7, 4)), generator.integers(0, 4, (7, 3))
    masked = generator.integers(1, 5, (7, 3)) * (generator.random((7, 3)) < 0.6)
    masked[4] = 0  # a sentence without any masked word
    features = {
        "ids": ids,
        "masked_lm_positions": positions,
        "masked_lm_ids": masked,
        "next_sentence_labels": generator.integers(0, 2, 7),
    }
    runner, _ = start(tmp_path, loss={"type": "bert"}, training={"eval_batch_size": size})
    metrics = runner.evaluate(loader(features)).metrics
    logits, counted = words[np.take_along_axis(ids, positions, 1)], masked != 0
    mlm = cross_entropies(logits[counted], masked[counted]).mean()
    nsp = cross_entropies(pairs[ids[:, 0]], features["next_sentence_labels"]).mean()
    assert metrics == {
        "loss": pytest.approx(mlm + nsp, rel=1e-6),
        "mlm_loss": pytest.approx(mlm, rel=1e-6),
        "nsp_loss": pytest.approx(nsp, rel=1e-6),
        "accuracy": (logits[counted].argmax(axis=1) == masked[counted]).mean(),
    }


@pytest.mark.parametrize("field", ["horizontal_parallel_size", "pipeline_parallel_size", "zero_stage"])
def test_a_separate_evaluation_model_needs_whole_weights(field: str) -> None:
    parameters = Parameters.from_mapping(
        {
            "paths": {"eval_model_path": "other.onnx", "model_path": "mlp.onnx"},
            "loss": CROSS_ENTROPY,
            "training": {"batch_size": 4, "num_train_steps": 4, "gradient_accumulation_steps": 4},
            "learning_rate": {"initial_lr": 0.1},
            "distributed": {"data_parallel_size": 2, field: 2},
        }
    )
    with pytest.raises(ParametersError, match="a separate evaluation model needs every full weight on each process"):
        _read_evaluation_graph(parameters, Path("other.onnx"), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_that_is_a_sum_is_shown_a_sample_in_training_and_in_evaluation(
    tmp_path: Path, accumulation: int
) -> None:
    """With a learning rate of 0 both are the same number over the same samples."""
    steps = {"num_train_steps": 8, "display_loss_steps": 8, "gradient_accumulation_steps": accumulation}
    runner, recorder = start(
        tmp_path, loss={**SQUARES, "reduction": "sum"}, training=steps, learning_rate={"initial_lr": 0.0}
    )
    runner.run(loader(TRAIN))
    shown = np.average(
        [report.loss for report in recorder.steps], weights=np.diff([0, *(r.step for r in recorder.steps)])
    )
    assert shown == pytest.approx(runner.evaluate(loader(TRAIN)).metrics["loss"], rel=1e-6)

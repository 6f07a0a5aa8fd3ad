"""Metrics by name are those of scikit-learn, whatever the batches, for every kind of loss; mistakes are explained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import sklearn.metrics as sk
from onnx import TensorProto, helper, numpy_helper

from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ParametersError
from onward.runner import TrainingRunner
from tests.mlp import CLASSES, CROSS_ENTROPY, ON_ONE_THREAD, SQUARES, data, forward, parameters, start, weights

pytest.importorskip("torchmetrics", reason="torchmetrics (onward[metrics]) computes metrics by name")

TEST = data(101, seed=1)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def of_classes(logits: np.ndarray, label: np.ndarray) -> dict[str, tuple[Any, float]]:
    """Entries of `training.metrics`, each with what scikit-learn says."""
    hits, shares = logits.argmax(axis=1), softmax(logits)
    macro = {"average": "macro", "labels": list(range(CLASSES)), "zero_division": 0}
    return {
        "f1": ({"name": "f1", "average": "macro"}, sk.f1_score(label, hits, **macro)),
        "precision": ({"name": "precision", "average": "macro"}, sk.precision_score(label, hits, **macro)),
        "recall": ({"name": "recall", "average": "weighted"}, sk.recall_score(label, hits, average="weighted")),
        "kappa": ({"name": "cohen_kappa", "as": "kappa"}, sk.cohen_kappa_score(label, hits)),
        "auroc": ("auroc", sk.roc_auc_score(label, shares, multi_class="ovr", average="macro")),
        "matthews_corr_coef": ("matthews_corr_coef", sk.matthews_corrcoef(label, hits)),
        "top2": ({"name": "accuracy", "top_k": 2, "average": "micro", "as": "top2"},
                 sk.top_k_accuracy_score(label, shares, k=2)),
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 101])
def test_metrics_of_classes_are_those_of_sklearn(tmp_path: Path, size: int) -> None:
    expected = of_classes(forward(TEST["x"], weights()), TEST["label"])
    asked = ["accuracy", *(entry for entry, _ in expected.values())]
    runner, _ = start(tmp_path, training={"metrics": asked, "eval_batch_size": size})
    found = runner.evaluate(InMemoryDataLoader(TEST)).metrics
    assert list(found) == ["loss", "accuracy", *expected]
    for name, (_, value) in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name
    assert found == runner.evaluate(InMemoryDataLoader(TEST)).metrics  # nothing stays from one pass to the next


def test_ignored_labels_do_not_count(tmp_path: Path) -> None:
    label = TEST["label"].copy()
    label[::3] = -100
    logits, counts = forward(TEST["x"], weights()), label != -100
    runner, _ = start(
        tmp_path,
        loss={**CROSS_ENTROPY, "ignore_index": -100},
        training={"metrics": [{"name": "f1", "average": "macro"}], "eval_batch_size": 10},
    )
    found = runner.evaluate(InMemoryDataLoader({**TEST, "label": label})).metrics
    expected = sk.f1_score(label[counts], logits.argmax(axis=1)[counts], average="macro")
    assert found["f1"] == pytest.approx(expected, abs=1e-6)


def test_a_value_for_each_class(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, training={"metrics": [{"name": "recall", "average": None}]})
    found = runner.evaluate(InMemoryDataLoader(TEST)).metrics
    expected = sk.recall_score(TEST["label"], forward(TEST["x"], weights()).argmax(axis=1), average=None)
    assert [found[f"recall/{index}"] for index in range(CLASSES)] == pytest.approx(list(expected), abs=1e-6)


def test_metrics_of_numbers_are_those_of_sklearn(tmp_path: Path) -> None:
    runner, _ = start(
        tmp_path, loss=SQUARES, training={"metrics": ["r2", "mae", "mean_squared_error"], "eval_batch_size": 9}
    )
    found = runner.evaluate(InMemoryDataLoader(TEST)).metrics
    outputs, target = forward(TEST["x"], weights()), TEST["target"]
    assert found["r2"] == pytest.approx(sk.r2_score(target, outputs), abs=1e-5)
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(target, outputs), abs=1e-5)
    assert found["mean_squared_error"] == pytest.approx(found["loss"], abs=1e-5)


def binary_model(path: Path, outputs: int, squashed: bool) -> np.ndarray:
    """`x [batch, 6]` -> scores (or probabilities) `[batch, outputs]`; returns the weight."""
    weight = np.random.default_rng(5).normal(0, 0.05, (6, outputs)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["scores" if squashed else "y"])]
    if squashed:
        nodes.append(helper.make_node("Sigmoid", ["scores"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "binary",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", outputs])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return weight


@pytest.mark.parametrize("squashed", [False, True])
@pytest.mark.parametrize("outputs", [1, 3])
def test_metrics_of_yes_and_no_are_those_of_sklearn(tmp_path: Path, outputs: int, squashed: bool) -> None:
    """Scores lie close to 0, where a batch of logits could be taken for one of probabilities."""
    weight = binary_model(tmp_path / "mlp.onnx", outputs, squashed)
    x = np.abs(TEST["x"])
    scores = x.astype(np.float64) @ weight
    truth = (scores + np.random.default_rng(2).normal(0, 0.2, scores.shape) > 0.05).astype(np.float32)
    asked = ["auroc", {"name": "f1", "average": "macro"}, {"name": "average_precision", "average": "macro"}]
    run = parameters(
        tmp_path,
        loss={"type": "binary_cross_entropy", "prediction": "y", "label": "truth", "from_logits": not squashed},
        training={"metrics": asked, "eval_batch_size": 5},
    )
    runner = TrainingRunner(run, ON_ONE_THREAD)
    runner.initialize()
    found = runner.evaluate(InMemoryDataLoader({"x": x, "truth": truth})).metrics
    average = {} if outputs == 1 else {"average": "macro"}
    flat = (lambda a: a.reshape(-1)) if outputs == 1 else (lambda a: a)
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(flat(truth), flat(scores), **average), abs=1e-6)
    assert found["f1"] == pytest.approx(sk.f1_score(flat(truth), flat(scores > 0), **average), abs=1e-6)
    expected = sk.average_precision_score(flat(truth), flat(scores), **average)
    assert found["average_precision"] == pytest.approx(expected, abs=1e-6)


MISTAKES = {
    "unknown name": (
        ["f1_scor"],
        r"^training\.metrics: torchmetrics has no metric 'f1_scor'\. Did you mean 'f1score' or",
    ),
    "unknown option": (
        [{"name": "f1", "avrage": "macro"}],
        r"^training\.metrics: 'f1' cannot be created with .*avrage",
    ),
    "wrong value": ([{"name": "f1", "average": "maccro"}], r"^training\.metrics: 'f1' cannot be created with .*maccro"),
    "unknown output": (
        [{"name": "f1", "prediction": "logit"}],
        r"^training\.metrics: 'f1': 'logit' is not an output of the model; its outputs are: 'logits'\.$",
    ),
    "unknown label": (
        [{"name": "f1", "label": "labels"}],
        r"^training\.metrics: 'f1': 'labels' is not a label or input of the run; those are: 'x', 'label'\.$",
    ),
    "no name": ([{"average": "macro"}], r"^training\.metrics\[0\] is .*; expected a name such as f1, or \{name: f1"),
    "twice": (
        ["f1", {"name": "f1", "average": "macro"}],
        r"^training\.metrics\[1\] is reported as 'f1', as is an earlier entry",
    ),
    "a matrix": (
        ["confusion_matrix"],
        r"^training\.metrics: 'confusion_matrix' is a tensor of shape \[4, 4\]; expected",
    ),
    "strange task": (
        [{"name": "f1", "task": "many"}],
        r"^training\.metrics: task of 'f1' is 'many'; expected one of b",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_explained(tmp_path: Path, mistake: str) -> None:
    asked, words = MISTAKES[mistake]
    with pytest.raises(ParametersError, match=words):
        start(tmp_path, training={"metrics": asked})[0].evaluate(InMemoryDataLoader(TEST))


def test_a_metric_of_classes_needs_a_task_where_the_loss_has_none(tmp_path: Path) -> None:
    words = (
        r"^training\.metrics: 'f1' is a classification metric, and loss\.type 'mean_squared_error' does not determine"
    )
    with pytest.raises(ParametersError, match=words):
        start(tmp_path, loss=SQUARES, training={"metrics": ["f1"]})


def test_without_torchmetrics_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchmetrics", None)
    words = re.escape(
        "training.metrics names 'f1', which the package torchmetrics computes; install it with pip install"
    )
    with pytest.raises(ParametersError, match=words):
        start(tmp_path, training={"metrics": ["f1"]})
    runner, _ = start(tmp_path, training={"metrics": ["accuracy"]})
    assert list(runner.evaluate(InMemoryDataLoader(TEST)).metrics) == ["loss", "accuracy"]

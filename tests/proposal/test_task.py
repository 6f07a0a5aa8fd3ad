"""The loss that an output and a label ask for, or why none does, in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onward.errors import DataError, ParametersError
from onward.proposal.data_facts import Feature
from onward.proposal.label import Label
from onward.proposal.task import Task, candidates, find_task, loss_of_output, own_loss
from tests.proposal.facts import feature, model, port, words

X = port("x", 4)


def task(output: Any, label: Any, ends_in: str = "", asked: str | None = None, classes: tuple[str, ...] = ()) -> Task:
    net = model((X,), (output,), ends_in={output.name: ends_in})
    own = label if isinstance(label, Feature) else feature("label", label)
    return find_task(net, Label(own, classes), None, asked)


def chosen(found: Task) -> dict[str, Any]:
    return {choice.field.removeprefix("loss."): choice.value for choice in found.loss}


NUMBERS = [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("output", "label", "ends_in", "kind", "fields"),
    [
        (port("y", 3), NUMBERS, "", "classification", {"type": "softmax_cross_entropy", "prediction": "y"}),
        (port("y", 3, 2, 2), np.zeros((4, 2, 2), int), "", "classification", {"class_axis": 1}),
        (port("y", 1), [0.5, 0.25], "", "regression", {"type": "mean_squared_error"}),
        (port("y", 1), [0, 1, 0], "", "binary", {"type": "binary_cross_entropy", "from_logits": True}),
        (port("y", 1), [0, 1, 0], "Sigmoid", "binary", {"type": "binary_cross_entropy", "from_logits": False}),
        (port("y", 3), np.eye(3)[NUMBERS], "", "classification", {"dense_labels": True}),
        (port("y", 3), [[1, 1, 0], [0, 0, 0]], "", "multi_label", {"type": "binary_cross_entropy"}),
        (port("y", 3), [0, -100, 1], "", "classification", {"ignore_index": -100}),
    ],
)
def test_losses(output: Any, label: Any, ends_in: str, kind: str, fields: dict[str, Any]) -> None:
    found = task(output, label, ends_in)
    assert found.kind == kind
    assert fields.items() <= chosen(found).items()


def test_labels_that_begin_with_1_are_shifted() -> None:
    found = task(port("y", 3), [1, 2, 3])
    assert found.operations == ("shift:-1",)
    assert found.reasons == ("the labels range from 1 to 3, the model's classes start at 0",)
    assert task(port("y", 4), [1, 2, 3]).operations == ()


@pytest.mark.parametrize(
    ("output", "label", "words_"),
    [
        (port("y", 2), NUMBERS, "it has 2 classes, the labels have 3. Use a model with 3 outputs, or leave out"),
        (
            port("y", 4),
            [3, 7, 3],
            "it has 4 classes, the labels have 2 classes with numbers up to 7. Use a model with 8",
        ),
        (port("y", 3), [0, -1, 2], "the smallest label is -1; classes start at 0. Use -100 for labels to ignore."),
        (port("y", 3), [0.5, 1.5], "it has 3 numbers per sample, the label has one. A regression needs an output"),
        (port("y", 3), [[0.5, 1.5]], "the shapes do not match."),
        (port("y", 1), words("l", "a", "b", "c"), "it has 1 number per sample, the label 3 classes."),
    ],
)
def test_why_none_fits(output: Any, label: Any, words_: str) -> None:
    with pytest.raises(DataError) as caught:
        task(output, label, classes=label.words if isinstance(label, Feature) else ())
    assert "which fits no output of the model. output 'y' float32" in str(caught.value)
    assert words_ in str(caught.value)


def test_more_outputs_than_classes_are_a_note() -> None:
    assert "the labels seen have 3 classes, the model's output 'y' has 9" in task(port("y", 9), NUMBERS).notes[0]
    assert "the labels seen have 2 classes, the model's output 'y' has 9" in task(port("y", 9), [3, 7, 3]).notes[0]


def test_a_loss_that_is_asked_for() -> None:
    found = task(port("y", 1), [0, 1, 0], asked="mean_squared_error")
    assert chosen(found) == {"type": "mean_squared_error", "prediction": "y"}
    assert task(port("y", 3), NUMBERS, asked="softmax_cross_entropy").kind == "classification"
    with pytest.raises(DataError, match=r"CTC needs scores of three axes, as \[batch, time, classes\], and labels of"):
        task(port("y", 3), NUMBERS, asked="ctc")


def test_outputs_in_the_order_in_which_they_are_likely() -> None:
    ports = tuple(port(name, 3) for name in ("hidden_states", "other", "scores", "logits"))
    net = model((X,), (*ports, port("ids", dtype="int64")))
    assert [one.name for one in candidates(net, None)] == ["logits", "scores", "other"]
    assert [one.name for one in candidates(model((X,), ports[:1]), None)] == ["hidden_states"]
    with pytest.raises(ParametersError, match="--prediction is 'y'; the outputs of the model are 'hidden_states', "):
        candidates(net, "y")
    with pytest.raises(DataError, match=r"no output of floating-point numbers .* outputs are 'ids' int64 \[batch\]"):
        find_task(model((X,), (port("ids", dtype="int64"),)), Label(feature("l", [0])), None, None)


def test_a_model_that_computes_its_own_loss() -> None:
    from onward.proposal.model_facts import Port

    loss = Port("total_loss", "float32", ())
    assert own_loss(model((X,), (port("y", 3), loss))) is loss
    assert own_loss(model((X,), (port("loss", 3),))) is None
    assert chosen(loss_of_output(loss)) == {"type": "output", "prediction": "total_loss"}

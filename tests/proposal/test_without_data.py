"""What a model alone suggests: a loss by its outputs, and the data that it needs."""

from __future__ import annotations

from typing import Any

import pytest

from onward.errors import DataError
from onward.proposal.model_facts import Port
from onward.proposal.proposal import Answers
from onward.proposal.without_data import match_nothing, needed_data
from tests.proposal.facts import model, port

X = port("x", 4)


@pytest.mark.parametrize(
    ("output", "ends_in", "loss", "needed"),
    [
        (port("y", 3), "", "softmax_cross_entropy", "int64 [], the number of the class, 0 to 2"),
        (port("y", 1), "", "mean_squared_error", "float32 [1]"),
        (port("y", 1), "Sigmoid", "binary_cross_entropy", "float32 [1], 0 or 1"),
        (port("y", 4), "", "mean_squared_error", "float32 [4]"),
        (port("y", 5, "h", "w"), "", "softmax_cross_entropy", "int64 [h, w], the number of the class, 0 to 4"),
        (
            port("y", 7, "classes"),
            "Softmax",
            "softmax_cross_entropy",
            "int64 [7], the number of the class, 0 to ",
        ),
        (Port("y", "float32", None), "", "mean_squared_error", "float32 of any shape"),
    ],
)
def test_losses_and_labels(output: Port, ends_in: str, loss: str, needed: str) -> None:
    net = model((X,), (output,), ends_in={"y": ends_in})
    match = match_nothing(net, Answers())
    assert match.task.loss[0].value == loss
    (question,) = match.questions
    assert question.found == loss
    data = needed_data(net, match)
    assert data["x"] == "float32 [4]"
    assert data[str(match.label)].startswith(needed)


def test_a_model_with_its_own_loss_needs_no_label() -> None:
    net = model((X,), (Port("loss", "float32", ()),))
    match = match_nothing(net, Answers())
    assert match.label is None
    assert needed_data(net, match) == {"x": "float32 [4]"}


def test_a_loss_that_is_asked_for() -> None:
    fields: dict[str, Any] = {
        choice.field: choice.value
        for choice in match_nothing(model((X,), (port("y", 1),)), Answers(loss="binary_cross_entropy")).task.loss
    }
    assert fields == {"loss.type": "binary_cross_entropy", "loss.prediction": "y", "loss.from_logits": True}


def test_outputs_that_no_loss_compares() -> None:
    with pytest.raises(DataError, match=r"no output of floating-point numbers .* its outputs are none\. Export"):
        match_nothing(model((X,), ()), Answers())

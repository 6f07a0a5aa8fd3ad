"""An output of the model that is the loss already, or is reduced to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from tests.graph.loss_models import RELATIVE, Shape, pass_through, run_loss


@pytest.mark.parametrize("opset", [7, 13, 18])
@pytest.mark.parametrize("shape", [[], [1], ["batch"]])
def test_an_output_of_the_model_is_the_loss(opset: int, shape: Shape, tmp_path: Path):
    """A rank-0 float32 output is used as it is; anything else is reduced."""
    value = np.array([0.5, 2.0], np.float32) if shape == ["batch"] else np.full(shape, 0.5, np.float32)
    outputs, names = run_loss(
        pass_through(opset, {"cost": shape}), LossSpec(type="output", prediction="cost"), {"cost_in": value}, tmp_path
    )
    assert names.loss == ("cost" if shape == [] else "loss")
    assert outputs[names.loss] == pytest.approx(value.mean(), rel=RELATIVE)


@pytest.mark.parametrize(
    ("shape", "reduction", "words"),
    [
        ([], "mean", None),
        ([1], "mean", None),
        (["batch"], "mean", "has shape [batch]: the mean of its numbers is minimized. If they are predictions, choose"),
        (["batch", 10], "sum", "'cost' has shape [batch, 10]: the sum of its numbers is minimized."),
    ],
)
def test_an_output_of_several_numbers_is_reported(shape: Shape, reduction: str, words: str | None):
    """Predictions that are taken for a loss train, too: to minus infinity."""
    notes = make_training_graph(
        pass_through(18, {"cost": shape}), loss=LossSpec(type="output", prediction="cost", reduction=reduction)
    ).notes
    assert [words in note for note in notes] == ([] if words is None else [True])

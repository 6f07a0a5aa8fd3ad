"""What a fit chooses from model and data: loss, names, label."""

from __future__ import annotations

import pytest

from tests.fitting.pairs import DATA, fit


def test_a_loss_that_is_left_out_is_chosen_from_model_and_data() -> None:
    """Classes for whole numbers, squares for others; what is given stays; the choice is reported with its reasons."""
    classes = fit(loss=None, steps=3, batch_size=None)
    assert (classes.parameters.loss.type, classes.parameters.loss.label) == ("softmax_cross_entropy", "label")
    (note,) = [text for text in classes.history.messages if text.startswith("loss was left out; chosen: ")]
    assert "loss.type: softmax_cross_entropy (the labels are class numbers" in note
    assert f"training.batch_size: {classes.parameters.training.batch_size} (" in note
    numbers = fit({"x": DATA["x"], "target": DATA["target"]}, loss=None, steps=3, learning_rate=0.5, batch_size=7)
    assert numbers.parameters.loss.type == "mean_squared_error"
    assert numbers.parameters.learning_rate.initial_lr == 0.5
    assert numbers.parameters.training.batch_size == 7
    assert fit(loss=None, epochs=2, optimizer="SGDOptimizer").parameters.optimizer.training_optimizer_name == (
        "SGDOptimizer"
    )


def test_other_names_are_matched() -> None:
    result = fit({"pixels": DATA["x"], "species": DATA["label"]}, loss=None, steps=3)
    assert dict(result.parameters.data.input_name_map) == {"pixels": "x"}
    assert result.parameters.loss.label == "species"


@pytest.mark.parametrize("name", ["label", "target", "y"])
def test_the_label_of_a_table_is_known_by_its_name(name: str) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(DATA["x"]).add_prefix("f").assign(**{name: DATA["label"]})
    expected = fit({"x": DATA["x"], "label": DATA["label"]}, shuffle=False).history.loss
    assert fit(frame, shuffle=False).history.loss == pytest.approx(expected, abs=1e-6)

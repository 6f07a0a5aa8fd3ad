"""Which feature is which input, and which one is the label: by name first, then by what fits."""

from __future__ import annotations

import numpy as np
import pytest

from onward.errors import DataError
from onward.proposal.matching import (
    assign,
    choose_label,
    free_label_name,
    is_label_name,
    missing_inputs,
    name_score,
    needed_inputs,
    synthesized,
    words_of,
)
from tests.proposal.facts import feature, model, port

X, IDS = port("x", 3), port("input_ids", 5, dtype="int64")


@pytest.mark.parametrize(
    ("name", "words"),
    [("petalWidth_cm", ["petal", "width", "cm"]), ("x1", ["x1"]), ("", []), ("__", []), ("Größe", ["gr", "e"])],
)
def test_words_of_names(name: str, words: list[str]) -> None:
    assert words_of(name) == words


def test_label_names() -> None:
    assert all(map(is_label_name, ("label", "TARGET", "class_id", "trueLabel", "annotations")))
    assert not any(map(is_label_name, ("x", "labelled", "response_time", "")))


def test_names_that_speak_for_each_other() -> None:
    scores = [name_score(*pair) for pair in (
        ("x", "x"), ("X", "x"), ("image", "pixel_values"), ("pixel_values_1", "values_2"), ("a", "b"), ("label", "b"),
    )]  # fmt: skip
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(scores)


def test_each_input_gets_one_feature_and_none_the_label() -> None:
    net = model((X, port("y", 3)), ())
    features = [feature(name, np.zeros((2, 3), np.float32)) for name in ("label", "y", "other", "more")]
    found = assign(net, net.inputs, features, "label")
    assert {name: one.name for name, (one, _) in found.chosen.items()} == {"x": "other", "y": "y"}
    assert [one.name for one in found.left] == ["label", "more"]
    few = assign(net, net.inputs, features[:2], "label")
    assert [one.name for one in few.missing] == ["x"]
    error = missing_inputs(net, few.missing, features[:1])
    assert "reads 'x' float32 [3] per sample, and no feature of the data has that shape and type; the data hold" in str(
        error
    )
    assert isinstance(error, DataError)


def test_the_label_is_asked_named_or_the_last_one() -> None:
    a, b, label = (feature(name, [0, 1]) for name in ("a", "b", "label"))
    net = model((), ())
    assert choose_label(net, [], None, [a]) == (None, ())
    assert choose_label(net, [a], None, [a])[0] is a
    assert choose_label(net, [a, label], None, [a, label]) == (label, ())
    chosen, (question,) = choose_label(net, [a, b], None, [a, b])
    assert chosen is b
    assert question.found == "b"
    assert "No input of the model takes 'a', 'b'." in question.text
    assert choose_label(net, [], "a", [a, b])[0] is a
    with pytest.raises(DataError, match=r"--label is 'c', which is not in the data. Pass one of 'a', 'b'\."):
        choose_label(net, [], "c", [a, b])


def test_inputs_that_follow_from_tokens() -> None:
    made = [synthesized(port(name, 5), "ids") for name in ("attention_mask", "token_type_ids", "position_ids", "x")]
    assert made == ["ids=ones:attention_mask", "ids=zeros:token_type_ids", "ids=positions:position_ids", None]
    assert synthesized(port("attention_mask", 5, 5), "ids") is None


def test_inputs_that_the_prediction_needs() -> None:
    outputs = (port("logits", 3), port("past_key_values", 3))
    net = model((X, IDS), outputs, needed={"logits": ("x",), "past_key_values": ("x", "input_ids")})
    assert needed_inputs(net, None) == [X]
    assert needed_inputs(net, "past_key_values") == [X, IDS]
    assert needed_inputs(model((X,), outputs, fixed_inputs={"x": 0.0}), None) == []


def test_a_label_gets_a_name_that_no_value_has() -> None:
    net = model((port("label", 1),), (), value_names=frozenset({"label_target"}))
    assert free_label_name(net, "label") == "label_target_target"
    assert free_label_name(net, "y") == "y"

"""Arrays and shards against a model: features to inputs, what is left to the label, or no label at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.errors import DataError
from onward.proposal.data_facts import DataFacts, Feature
from onward.proposal.match_features import match_features
from onward.proposal.matching import Match
from onward.proposal.model_facts import ModelFacts, Port
from onward.proposal.proposal import Answers
from tests.proposal.facts import feature, model, port

NET = model((port("x", 3),), (port("logits", 2),))
X, LABEL = feature("data", np.zeros((6, 3), np.float32)), feature("label", [0, 1, 1, 0, 1, 0])


def match(net: ModelFacts, *features: Feature, kind: str = "arrays", **answers: Any) -> Match:
    data = DataFacts(path=Path("data.npz"), kind=kind, features=features, sample_count=6)
    return match_features(net, data, Answers(**answers), Path("shards"))


def test_features_are_named_and_packed() -> None:
    found = match(NET, X, LABEL, feature("id", [9, 8, 7, 6, 5, 4]))
    assert (found.name_map, found.label, found.task.kind) == ({"data": "x"}, "label", "classification")
    assert found.packing is not None
    assert found.packing.options.source.arrays == ("data", "label")  # type: ignore[union-attr]


def test_shards_are_taken_as_they_are_or_refused() -> None:
    found = match(NET, X, LABEL, feature("id", [9] * 6), kind="packed")
    assert found.packing is None
    assert found.name_map == {"data": "x", "id": ""}
    with pytest.raises(DataError, match=r"do not fit the model as they are .* or pack them again with --transform lab"):
        match(NET, X, feature("label", [1, 2, 1, 2, 1, 2]), kind="packed")
    column = feature("label", [[0], [1], [1], [0], [1], [0]])
    one = model((port("x", 3),), (port("y", 1),))
    assert match(one, X, column, kind="packed").task.kind == "binary"


def test_sorted_labels_are_shuffled() -> None:
    many = feature("data", np.zeros((400, 3), np.float32)), feature("label", np.repeat([0, 1], 200))
    data = DataFacts(path=Path("a.npz"), kind="arrays", features=many, sample_count=400)
    packing = match_features(NET, data, Answers(), Path("shards")).packing
    assert packing is not None
    assert packing.options.shuffle_buffer == 400
    assert packing.reasons[-1].endswith("they are shuffled during packing")


def test_flags_become_numbers() -> None:
    one = model((port("x", 3),), (port("y", 1),))
    packing = match(one, X, feature("label", np.array([True, False] * 3))).packing
    assert packing is not None
    assert packing.options.cast[-1][0] == "label"


def test_inputs_that_follow_from_tokens() -> None:
    net = model(
        (port("ids", 4, dtype="int64"), port("attention_mask", 4, dtype="int64")), (port("logits", 2),),
        tables={"ids": 9},
    )  # fmt: skip
    found = match(net, feature("ids", np.ones((6, 4), np.int64)), LABEL)
    assert found.packing is not None
    assert ("ids", "ones:attention_mask") in found.packing.options.transform


def test_without_a_label() -> None:
    auto = model((port("x", 3),), (port("y", 3),))
    found = match(auto, X)
    assert (found.task.text, found.label) == ("reconstructing the input", "x")
    with pytest.raises(DataError, match=r"holds no label: its features \('data' float32 \[3\]\) are all inputs"):
        match(NET, X)
    own = model((port("x", 3),), (Port("loss", "float32", ()),))
    assert match(own, X).label is None


def test_what_is_missing() -> None:
    with pytest.raises(DataError, match=r"reads 'x' float32 \[3\] per sample, and no feature of the data has that"):
        match(NET, feature("other", np.zeros((6, 5), np.float32)), LABEL)

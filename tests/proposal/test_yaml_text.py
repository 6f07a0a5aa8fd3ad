"""A proposal as a RUN.yaml: it reads back as what was proposed, whatever the values and the reasons hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from onward.data.packing.options import PackOptions
from onward.proposal.proposal import Choice, Packing, Question
from onward.proposal.yaml_text import to_yaml
from tests.proposal.facts import proposal


@pytest.mark.parametrize(
    "value",
    [
        5e-05, 1e22, 0.0, -1.5, 1, True, None, "a", "yes", "1e-3", "a: b # c", "größe", "line\nline", "", [],
        ["*bias*", "w"], [{"weights": ["a", "b"], "lambda": 1e-05}], {"a": "b", "c: d": "e"}, "*", "'quoted'",
    ],
)  # fmt: skip
def test_values_read_back(value: Any) -> None:
    made = proposal(Choice("training.field", value, "why"), Choice("training.other", 1))
    found = yaml.safe_load(to_yaml(made, "onward init"))["training"]
    assert found["other"] == 1
    assert found["field"] == (value or None if value == [] else value)
    assert type(found["field"]) is type(value) or value == []


def test_reasons_and_notes_are_comments_whatever_they_hold() -> None:
    evil = "first\ntraining: {batch_size: 3}\n" + "word " * 60
    made = proposal(
        Choice("training.batch_size", 8, evil), questions=(Question("k", evil, evil),), notes=(evil,),
        needed_data={"x": evil},
        packing=Packing(source=Path("data set"), folder=Path("shards"), options=PackOptions(), reasons=(evil,)),
    )  # fmt: skip
    text = to_yaml(made, "onward init net.onnx")
    assert yaml.safe_load(text) == {"training": {"batch_size": 8}}
    assert all(len(line) <= 110 or " " not in line.strip("# ") for line in text.splitlines())
    assert "# Written by: onward init net.onnx\n" in text
    assert "# The data were packed by: onward pack 'data set' shards\n" in text

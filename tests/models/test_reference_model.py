"""The options of reference models: what is refused, and in which words."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from onward.errors import ParametersError
from onward.models import REFERENCE_MODELS, create_model


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": 3}, r"gpt2 has no option 'layer'; did you mean 'layers'\? Its options: opset, seed, "),
        ({"layers": "3"}, "option layers must be of type int, got '3'"),
        ({"layers": True}, "option layers must be of type int, got True"),
        ({"layers": 0}, "option layers is 0; it must be at least 1"),
        ({"size": "huge"}, "option size is 'huge'; choose one of: tiny, small, medium, large, xl"),
        ({"dropout": 1.0}, "option dropout is 1.0; it must be at least 0 and below 1"),
        ({"dropout": float("nan")}, "option dropout is nan; it must be at least 0 and below 1"),
        ({"opset": 12}, "option opset is 12; it must be at least 13 and at most 23"),
        ({"tied_embedding": 1}, "option tied_embedding must be of type bool, got 1"),
        ({"seed": None}, "option seed must be of type int, got None"),
    ],
)
def test_wrong_options_say_what_to_do(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParametersError, match=words):
        create_model("gpt2", **options)


def test_an_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(ParametersError, match=r"'gpt'; did you mean 'gpt2'\? Choose gpt2, bert, squeezenet, mnist"):
        create_model("gpt")


def test_every_option_is_explained() -> None:
    for model in REFERENCE_MODELS.values():
        for field in dataclasses.fields(model.options):
            assert len(field.metadata["help"]) > 10, (model.name, field.name)


def test_a_number_of_either_kind_is_a_ratio() -> None:
    create_model("mnist", dropout=0)

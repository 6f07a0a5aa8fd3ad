"""Rules of the section `optimizer`: names, switches, and numbers out of range."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from onward.parameters.optimizer import AttributeRule, Optimizer, SwitchRule


def test_lambda_is_written_as_in_yaml_or_as_in_python() -> None:
    adapter = pydantic.TypeAdapter(AttributeRule)
    assert adapter.validate_python({"lambda": 0.5}).lambda_ == adapter.validate_python({"lambda_": 0.5}).lambda_ == 0.5


@pytest.mark.parametrize(("value", "switch"), [(1, True), (0, False), (True, True), (False, False), (None, None)])
def test_switches_are_numbers_or_flags(value: Any, switch: bool | None) -> None:
    assert pydantic.TypeAdapter(SwitchRule).validate_python({"nesterov": value}).nesterov is switch


@pytest.mark.parametrize("value", [2, -1, "1", 0.5])
def test_other_numbers_are_no_switches(value: Any) -> None:
    with pytest.raises(pydantic.ValidationError):
        pydantic.TypeAdapter(SwitchRule).validate_python({"nesterov": value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("alpha", 1.0), ("beta", -0.1), ("lambda", -1), ("epsilon", float("nan")), ("beta2_decay", 0.1), ("momentum", 1)],
)
def test_numbers_out_of_range(field: str, value: float) -> None:
    with pytest.raises(pydantic.ValidationError):
        pydantic.TypeAdapter(AttributeRule).validate_python({field: value})


def test_a_field_that_is_none_and_an_optimizer_that_is_none() -> None:
    with pytest.raises(pydantic.ValidationError, match="weigths"):
        pydantic.TypeAdapter(AttributeRule).validate_python({"weigths": "*"})
    with pytest.raises(pydantic.ValidationError, match=r"expected .*'AdamW', 'Lamb'"):
        pydantic.TypeAdapter(Optimizer).validate_python({"training_optimizer_name": "Adamax"})

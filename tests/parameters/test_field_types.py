"""Types of fields: names of a registry are looked up when they are checked."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from onward.parameters import field_types
from onward.parameters.field_types import OneOf


@pytest.mark.parametrize("value", ["c", "A", "", 1, None, ["a"]])
def test_names_that_are_none_of_a_registrys(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^expected 'a' or 'b'$"):
        OneOf(lambda: [("a", "first"), ("b", "")]).check(value)


def test_names_are_read_when_they_are_needed() -> None:
    names = [("a", "first")]
    one = OneOf(lambda: names)
    assert one.check("a") == "a"
    names.append(("b", ""))
    assert one.check("b") == "b"
    assert one.described() == "`a` (first) or `b`"


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("Flag", [True, False], [1, 0, "true", None]),
        ("CountFromZero", [0, 2**63 - 1], [-1, 2**63, True, 1.0, "1"]),
        ("Count", [1], [0]),
        ("BatchSize", [1, 2**31 - 1], [0, 2**31]),
        ("ZeroStage", [0, 3], [4, -1]),
        ("NonNegative", [0, 0.0, 1e300], [-1e-300, float("inf"), float("nan")]),
        ("Positive", [1e-300, 1], [0, float("inf")]),
        ("Number", [float("inf"), -1], ["1", True]),
        ("FromOne", [1, 2.5], [0.999]),
        ("Share", [0, 1], [1.0000001, float("nan")]),
        ("PositiveShare", [1], [0]),
        ("ShareBelowOne", [0, 0.999], [1]),
        ("NonPositive", [0, -0.8], [0.1]),
    ],
)
def test_ends_of_ranges(kind: str, right: list[Any], wrong: list[Any]) -> None:
    adapter = pydantic.TypeAdapter(getattr(field_types, kind))
    for value in right:
        assert adapter.validate_python(value) == value
    for value in wrong:
        with pytest.raises(pydantic.ValidationError):
            adapter.validate_python(value)

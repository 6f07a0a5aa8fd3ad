"""The section `limits`: from a file, from a command line, and what is changed."""

from __future__ import annotations

from typing import Any

import pytest

from onward.errors import ParametersError
from onward.parameters.limits import DEFAULT_LIMITS, UNLIMITED, Limits


def test_what_is_given_is_changed_and_the_rest_is_not() -> None:
    assert Limits.from_fields({}) == DEFAULT_LIMITS
    assert DEFAULT_LIMITS.changed() == {}
    assert Limits.from_fields({"nodes": 7, "model_gb": 2000}).changed() == {"nodes": 7}
    assert Limits.from_overrides({"limits.model_gb": "1.5", "limits.nesting": "3"}).changed() == {
        "model_gb": 1.5, "nesting": 3,
    }  # fmt: skip


def test_unlimited_is_above_every_default() -> None:
    assert UNLIMITED.changed().keys() == vars(DEFAULT_LIMITS).keys()
    assert all(value > getattr(DEFAULT_LIMITS, name) for name, value in vars(UNLIMITED).items())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1], r"limits is \[1\]; expected fields with their values\."),
        ({"node": 1}, r"limits\.node is unknown\. Did you mean 'nodes'\?"),
        ({"nodes": 0}, r"limits\.nodes is 0; expected greater than or equal to 1\."),
        ({"nodes": True}, r"limits\.nodes is True; expected "),
        ({"model_gb": float("inf")}, r"limits\.model_gb is inf; expected "),
        ({"model_gb": "1"}, r"limits\.model_gb is '1'; expected a number\."),
    ],
)
def test_what_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ParametersError, match=words):
        Limits.from_fields(given)


def test_every_mistake_is_named() -> None:
    with pytest.raises(ParametersError) as caught:
        Limits.from_fields({"nodes": 0, "nesting": -1})
    assert len(str(caught.value).splitlines()) == 2

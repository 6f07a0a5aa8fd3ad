"""Fields with type, unit, default and meaning, read from dataclasses and their docstrings."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import pytest

from onward.errors import ParametersError
from onward.parameters.field_types import OneOf
from onward.parameters.fields import default_of, explain, fields_of, listing, meanings, sections, summary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """What is asked
    of an example.

    More of it.

    Attributes:
        num_train_steps: how long,
            in detail.
        low_, high: bounds: both of them.
        kind: {names}.
        mode: how.
    """

    num_train_steps: int
    low_: float = 0.5
    high: float | None = None
    kind: Annotated[str, OneOf(lambda: [("a", "first"), ("b", "")])] = "a"
    mode: Literal["x", "y"] = "x"
    flag: bool = False
    many: tuple[str, ...] = ()


def test_docstrings() -> None:
    assert summary_of(Example) == "What is asked of an example."
    assert meanings(Example) == {
        "num_train_steps": "how long, in detail.", "low_": "bounds: both of them.", "high": "bounds: both of them.",
        "kind": "`a` (first) or `b`.", "mode": "how.",
    }  # fmt: skip


def test_types_units_and_defaults() -> None:
    found = {one.name: one for one in fields_of("s", Example)}
    steps = found["s.num_train_steps"]
    assert (steps.is_required, steps.unit) == (True, "steps (forward/backward passes)")
    assert (found["s.low"].default, found["s.high"].default, found["s.flag"].default) == ("0.5", "", "false")
    assert (found["s.mode"].type, found["s.kind"].type) == ("one of x, y", "one of a, b")
    assert (found["s.many"].type, found["s.many"].meaning) == ("a list", "")


def test_defaults_as_one_would_write_them() -> None:
    made = dataclasses.make_dataclass(
        "Made",
        [(name, object, value) for name, value in (("a", 1e-7), ("b", 600.0), ("c", 10**9), ("d", True), ("e", "x"))],
    )
    assert [default_of(one) for one in dataclasses.fields(made)] == ["1e-07", "600", "1000000000", "true", "x"]


def test_explanations() -> None:
    assert explain("training").startswith("training: ")
    text = explain("training.batch_size", width=30)
    assert text.startswith("training.batch_size\n")
    assert all(len(line) <= 40 for line in text.splitlines())
    assert all(f"\n{name}: " in f"\n{listing()}" for name in sections())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("batch_size", "Did you mean 'training.batch_size'"),
        ("training.batchsize", "'training.batch_size'"),
        ("trainnig", "Did you mean 'training'"),
        ("qqqqqq", "The sections are: paths, "),
        ("", "The sections are: "),
    ],
)
def test_names_that_are_none(name: str, hint: str) -> None:
    with pytest.raises(ParametersError, match=r"is neither a command, a section nor a field of a RUN\.yaml") as caught:
        explain(name)
    assert hint in str(caught.value)

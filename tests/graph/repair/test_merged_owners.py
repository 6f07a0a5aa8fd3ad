"""Merged parameters by the notes of torch's newer exporter: each has its owner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.graph.merged_parameters import (
    Case,
    check,
    train_case,
)

OF_NEWER = [
    ("norms", "fresh"),
    ("norms", "one"),
    ("batch_norms", "fresh"),
    ("two_attentions", "fresh"),
    ("decoder", "fresh"),
    ("reshaped_vectors", "fresh"),
    ("vectors", "equal"),
    ("named_copies", "equal"),
    ("recurrent", "equal"),
]
"""Kinds and values that came apart, or did not, each for its own reason."""


@pytest.mark.parametrize(("kind", "values"), OF_NEWER)
def test_parameters_by_the_newer_exporter(kind: str, values: str, tmp_path: Path) -> None:
    check(Case(kind, values, 8, "new"), tmp_path)


@pytest.mark.parametrize("kind", ["two_attentions", "norms"])
def test_constants_that_the_exporter_made_do_not_train_without_its_notes(kind: str, tmp_path: Path) -> None:
    """The 1 of `x + 1`, and the scale and bias of the instance norm in a group norm."""
    outcome = train_case(Case(kind, "random", 8, "new", "stripped"), tmp_path)
    assert outcome.is_right(), outcome


@pytest.mark.parametrize("kind", ["recurrent", "copies_called_twice"])
def test_tensors_of_one_node_are_apart_and_those_of_one_bias_together(kind: str, tmp_path: Path) -> None:
    """Two recurrent layers of which every matrix is equal; a matrix of zeros, stored once for each call."""
    values, exporter = ("equal", "old") if kind == "recurrent" else ("zero matrices", "old, inputs")
    check(Case(kind, values, 8, exporter), tmp_path)

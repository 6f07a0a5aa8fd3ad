"""The entries of `training.metrics`, read; what is no metric is refused with its place."""

from __future__ import annotations

from typing import Any

import pytest

from onward.parameters.evaluation import MetricRequest, read_metrics


def test_names_and_mappings() -> None:
    read = read_metrics(["f1", {"name": "f1", "as": "f1_macro", "average": "macro", "task": "multiclass"}])
    assert read == (
        MetricRequest(name="f1", title="f1"),
        MetricRequest(name="f1", title="f1_macro", task="multiclass", options={"average": "macro"}),
    )
    assert read_metrics([]) == ()


def test_the_users_mapping_is_left_alone() -> None:
    given = {"name": "f1", "as": "x"}
    read_metrics([given])
    assert given == {"name": "f1", "as": "x"}


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([""], r"training\.metrics\[0\] is ''; expected a name such as f1, or {name: f1, average: macro}\."),
        (["f1", {"average": "macro"}], r"training\.metrics\[1\] is {'average': 'macro'}; expected a name"),
        ([{"name": 3}], r"training\.metrics\[0\] is {'name': 3}; expected a name"),
        ([{"name": "f1", "label": 3}], r"training\.metrics\[0\]\.label is 3; expected text\."),
        ([{"name": "f1", "as": "loss"}], r"training\.metrics\[0\]\.as is 'loss'; expected another name\."),
        (["loss"], r"training\.metrics\[0\]\.as is 'loss'; expected another name\."),
        ([{"name": "f1", "as": ""}], r"training\.metrics\[0\]\.as is ''; expected another name\."),
        (["f1", "f1"], r"training\.metrics\[1\] is reported as 'f1', as is an earlier entry\. Set `as: NAME` in one"),
    ],
)
def test_what_is_no_metric(specs: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_metrics(specs)

"""What all trackers have in common: events as named values, an end that is told once, nested fields as flat ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from onward.report.trackers.tracker import Plain, Tracker, flat
from tests.report.events import evaluation_report, run_summary, step_report


class Remembered:
    """A run that remembers what it is told."""

    id = "7"

    def __init__(self, fails: bool = False) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.fails = fails

    def log(self, values: Mapping[str, float], update: int) -> None:
        self.told.append(("log", dict(values), update))

    def describe(self, values: Mapping[str, Plain]) -> None:
        self.told.append(("describe", dict(values)))

    def write_text(self, name: str, text: str) -> None:
        if self.fails:
            raise OSError("full")
        self.told.append(("text", name, text))

    def refer_to_model(self, path: str) -> None:
        self.told.append(("model", path))

    def finish(self, status: str) -> None:
        self.told.append(("finish", status))


def test_what_is_not_known_is_not_reported() -> None:
    run = Remembered()
    Tracker(run).on_step(step_report(3, loss=1, tokens_per_second=None, mfu=None))
    ((_, values, update),) = run.told
    assert update == 3
    assert values["train/loss"] == 1.0
    assert isinstance(values["train/loss"], float)
    assert "train/tokens_per_second" not in values
    Tracker(run).on_evaluation(evaluation_report(4, {"loss": 2, "f1": 0.5}))
    assert run.told[-1] == ("log", {"test/loss": 2.0, "test/f1": 0.5}, 4)


def test_results_of_a_round() -> None:
    run = Remembered()
    Tracker(run).on_end(run_summary(first_loss=None, stopped=None, checkpoint=None, metrics={"loss": 1.5}))
    ((_, values),) = run.told
    assert values["summary/steps"] == 400
    assert values["summary/test/loss"] == 1.5
    assert not {"summary/first_loss", "summary/stopped", "summary/checkpoint"} & set(values)


def test_the_first_end_counts_and_is_told_once() -> None:
    run = Remembered()
    tracker = Tracker(run, ("before",))
    tracker.on_message("after")
    tracker.finish("interrupted")
    tracker.finish("done")
    tracker.close()
    tracker.close()
    assert run.told == [("text", "messages.txt", "before\nafter\n"), ("finish", "interrupted")]
    assert tracker.state_dict() == {"id": "7"}


def test_the_run_ends_though_its_messages_cannot_be_written() -> None:
    run = Remembered(fails=True)
    with pytest.raises(OSError, match="full"):
        Tracker(run).close()
    assert run.told == [("finish", "failed")]


def test_nested_fields() -> None:
    nested = {"a": {"b": {"c": 1}, "empty": {}}, "d": [1, 2], "e": None, "f": True}
    assert flat(nested) == {"a.b.c": 1, "d": "[1, 2]", "e": None, "f": True}

"""What a run left in its folder: damaged files are named, unfinished runs are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onward.errors import DataError
from onward.report.page.page import render_page
from onward.report.page.run_record import read_run


def test_damaged_files_and_unfinished_runs(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    step = json.dumps({"kind": "step", "time": 1.0, "update": 1, "loss": "NaN", "learning_rate": 0.1})
    metrics.write_text(f'{step}\n{{"kind": "st')
    record = read_run(tmp_path, "x")
    assert record.curves["loss"] == [(1, None)]
    assert not record.is_finished
    page = render_page([record], {})
    assert "not finished" in page
    assert "No evaluation or end of a round has been recorded yet." in page
    metrics.write_text(f"nonsense\n{step}\n")
    with pytest.raises(DataError, match=r"line 1 is not JSON: .*Restore the file\."):
        read_run(tmp_path, "x")
    metrics.write_text(f"{step}\n")
    (tmp_path / "steps.nodes.csv").write_text("name,operator\na,b\n")
    with pytest.raises(DataError, match=r"is damaged: KeyError\('calls'\)\. Profile the run again"):
        read_run(tmp_path, "x")


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "evaluation", "metrics": {"loss": "LARGE", "f1": 0.5}},
        {"kind": "evaluation", "metrics": {"loss": "HUGE", "f1": 0.5}},
    ],
)
def test_numbers_beyond_those_of_a_float_are_gaps(event: dict[str, object], tmp_path: Path) -> None:
    """JSON has no largest number: 1e999 is read as infinite, and 400 digits do not fit a float."""
    text = json.dumps(event).replace('"LARGE"', "1e999").replace('"HUGE"', "9" * 400)
    (tmp_path / "metrics.jsonl").write_text(f"{text}\n")
    record = read_run(tmp_path, "x")
    assert record.curves["evaluation loss"] == [(0, None)]
    assert record.final == {"evaluation f1": 0.5}
    assert "0.5000" in render_page([record], {})


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "step", "update": "three", "loss": 1.0}, {"kind": "step", "time": "now"},
        {"kind": "evaluation", "metrics": [1]}, {"kind": "message", "update": None}, {"kind": "message"},
    ],
)  # fmt: skip
def test_events_that_hold_something_else_are_damaged(event: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(event) + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl' is damaged: .*Restore the file\."):
        read_run(tmp_path, "x")


def test_results_of_a_resumed_run_are_of_the_round(tmp_path: Path) -> None:
    """Its three sessions, not the last one alone; a duration says since when it counts."""
    now = {"steps": 804, "updates": 402, "samples": 1608, "first_loss": 0.0082, "last_loss": 0.0075, "seconds": 9.0}
    before = {"steps_before": 1000, "updates_before": 500, "samples_before": 2000, "first_loss_of_round": 2.64}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "end", **now, **before}) + "\n")
    record = read_run(tmp_path, "x")
    assert record.final == {
        "steps": 1804, "updates": 902, "samples": 3608, "first loss": 2.64, "last loss": 0.0075,
        "since step 1000 seconds": 9.0,
    }  # fmt: skip
    assert "since step 1000 seconds" in render_page([record], {})
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "end", **now}) + "\n")
    assert read_run(tmp_path, "x").final["first loss"] == 0.0082

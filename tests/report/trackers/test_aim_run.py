"""Runs report to trackers: what their own files hold is what metrics.jsonl holds, also after a resume and a failure."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from onward.engine.callbacks import Callback
from onward.engine.reports import UpdateReport
from tests.report.trackers.runs import InterruptAt, documented, expected_points, train


class FakeRun:
    """Aim's `Run`, as far as a tracker uses it."""

    runs: list[FakeRun]
    fails_with: Exception | None = None

    def __init__(self, run_hash: str | None = None, **options: Any) -> None:
        self.hash, self.options = run_hash or f"hash{len(self.runs)}", options
        self.attributes: dict[str, Any] = {}
        self.points: list[tuple[str, str, int, float]] = []
        self.is_closed = False
        self.runs.append(self)

    def __setitem__(self, name: str, value: Any) -> None:
        json.dumps(value)
        self.attributes[name] = value

    def track(self, value: float, *, name: str, step: int, context: dict[str, str]) -> None:
        if self.fails_with is not None:
            raise self.fails_with
        self.points.append((context["subset"], name, step, value))

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@pytest.fixture
def aim_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    module = types.ModuleType("aim")
    module.__spec__ = importlib.util.spec_from_loader("aim", None)
    FakeRun.runs, FakeRun.fails_with = [], None
    module.Run = FakeRun  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "aim", module)
    monkeypatch.delitem(sys.modules, "onward.report.trackers.aim_run", raising=False)
    return FakeRun.runs


def test_aim_gets_what_metrics_jsonl_holds(tmp_path: Path, aim_runs: list[FakeRun]) -> None:
    records = train(tmp_path, aim={**documented("aim"), "name": "first"})
    (run,) = aim_runs
    assert (run.options["experiment"], run.options["repo"], run.name) == ("digits", ".", "first")  # type: ignore[attr-defined]
    assert {(f"{subset}/{name}", step, value) for subset, name, step, value in run.points} == expected_points(records)
    assert run.attributes["parameters"]["learning_rate"]["initial_lr"] == 0.1
    assert run.attributes["trained_model"] == str(tmp_path / "out" / "mlp_trained.onnx")
    assert run.attributes["status"] == "done"
    assert run.attributes["summary/steps"] == 8
    assert "initial_lr: 0.1" in run.attributes["resolved.yaml"]
    assert "mlp_trained.onnx" in run.attributes["messages.txt"]
    assert run.is_closed


def test_an_interrupted_run_is_continued_and_one_from_its_checkpoint_is_new(
    tmp_path: Path, aim_runs: list[FakeRun]
) -> None:
    sections = {"aim": {"experiment": "digits"}}
    kept = {"checkpoint": {"checkpoints_dir": tmp_path / "kept", "checkpoint_period": 2}}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, InterruptAt(), **sections, **kept)
    assert aim_runs[0].attributes["status"] == "interrupted"
    assert aim_runs[0].is_closed
    train(tmp_path, **sections, **kept)
    assert [run.hash for run in aim_runs] == ["hash0", "hash0"]
    assert aim_runs[1].attributes["status"] == "done"
    assert {step for _, _, step, _ in aim_runs[1].points} == {3, 4, 5, 6, 7, 8}
    other = {"checkpoint": {"checkpoints_dir": tmp_path / "new", "checkpoint_to_load_path": tmp_path / "kept"}}
    train(tmp_path, **sections, **other)
    assert aim_runs[2].hash == "hash2"


def test_a_failed_run_is_marked(tmp_path: Path, aim_runs: list[FakeRun]) -> None:
    class Failing(Callback):
        def on_update(self, report: UpdateReport) -> None:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train(tmp_path, Failing(), aim={"experiment": "digits"})
    assert aim_runs[0].attributes["status"] == "failed"


def test_a_trackers_failure_is_reported_once_and_ends_nothing(tmp_path: Path, aim_runs: list[FakeRun]) -> None:
    FakeRun.fails_with = ConnectionError("server gone")
    records = train(tmp_path, aim={"experiment": "digits"})
    told = [record["text"] for record in records if "server gone" in record.get("text", "")]
    assert told == ["AimTracker stops, training goes on: ConnectionError: server gone"]
    assert [record["update"] for record in records if record["kind"] == "step"] == list(range(1, 9))
    assert aim_runs[0].is_closed


def test_a_tracker_that_cannot_be_opened_is_reported(
    tmp_path: Path, aim_runs: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FakeRun, **_: Any) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(FakeRun, "__init__", refuse)
    records = train(tmp_path, aim={"experiment": "digits"})
    assert [r for r in records if r.get("text") == "aim: the run is not reported there: ConnectionError: no server"]

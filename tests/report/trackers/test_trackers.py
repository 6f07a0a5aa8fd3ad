"""Runs report to trackers: what their own files hold is what metrics.jsonl holds, also after a resume and a failure."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.callbacks import Callback
from onward.engine.reports import UpdateReport
from onward.errors import ParametersError
from onward.report.trackers.tracker import STEP_FIELDS
from onward.runner import TrainingRunner
from tests.mlp import ON_ONE_THREAD, data, parameters, save_mlp, start


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


class InterruptAt(Callback):
    """Ends the run as Ctrl-C does, after a checkpoint."""

    def on_update(self, report: UpdateReport) -> None:
        if report.update == 4:
            raise KeyboardInterrupt


def train(folder: Path, *watchers: Any, **sections: Any) -> list[dict[str, Any]]:
    """Trains 8 steps with two evaluations; the records of metrics.jsonl."""
    places = {
        "paths": {"output_dir": folder / "out"},
        "tensorboard": {"log_dir": folder / "tb"},
        "training": {"evaluation_period": 4},
    }
    runner, _ = start(folder, *watchers, **places, **sections)
    test = InMemoryDataLoader(data(8))
    try:
        runner.run(InMemoryDataLoader(data(32)), test)
        runner.end_training(test)
    finally:
        runner.watchers.close()
    return [json.loads(line) for line in (folder / "tb" / "metrics.jsonl").read_text().splitlines()]


def documented(section: str) -> dict[str, Any]:
    """The section of a tracker as docs/howto/watching.md shows it."""
    page = (Path(__file__).parents[3] / "docs" / "howto" / "watching.md").read_text()
    (block,) = [b for b in re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL) if b.startswith("wandb:")]
    found: dict[str, Any] = yaml.safe_load(block)[section]
    return found


def expected_points(records: list[dict[str, Any]]) -> set[tuple[str, int, float]]:
    points = set()
    for record in records:
        if record["kind"] == "step":
            found = {f"train/{name}": record[name] for name in STEP_FIELDS}
        elif record["kind"] == "evaluation":
            found = {f"test/{name}": value for name, value in record["metrics"].items()}
        else:
            continue
        points |= {(name, record["update"], float(value)) for name, value in found.items() if value is not None}
    return points


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


@pytest.mark.parametrize(("name", "field"), [("wandb", "project"), ("mlflow", "experiment"), ("aim", "experiment")])
def test_a_missing_package_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, field: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one, *rest: None if one == name else found(one, *rest))
    save_mlp(tmp_path)
    with pytest.raises(ParametersError) as caught:
        TrainingRunner(parameters(tmp_path, **{name: {field: "x"}}), ON_ONE_THREAD)
    assert str(caught.value) == (
        f"{name}.{field} is 'x', but the package {name!r} is not installed. Run pip install \"onward[{name}]\", or "
        f"remove the section {name}."
    )


def test_mlflow_holds_what_metrics_jsonl_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow or mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    uri = (tmp_path / "mlruns").as_uri()
    sections = {
        "mlflow": {**documented("mlflow"), "tracking_uri": uri},
        "checkpoint": {"checkpoints_dir": tmp_path / "kept", "checkpoint_period": 2},
    }
    client = mlflow.MlflowClient(tracking_uri=uri)

    def only_run() -> Any:
        (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
        return run

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, InterruptAt(), **sections)
    assert only_run().info.status == "KILLED"
    records = train(tmp_path, **sections)
    run = only_run()
    names = run.data.metrics
    points = {(n, p.step, p.value) for n in names for p in client.get_metric_history(run.info.run_id, n)}
    assert points >= expected_points(records)
    assert {(n, u) for n, u, _ in points} == {(n, u) for n, u, _ in expected_points(records)}
    assert run.info.status == "FINISHED"
    assert run.data.params["learning_rate.initial_lr"] == "0.1"
    assert run.data.tags["trained_model"] == str(tmp_path / "out" / "mlp_trained.onnx")
    assert {one.path for one in client.list_artifacts(run.info.run_id)} == {
        "messages.txt", "resolved.yaml", "run.json",
    }  # fmt: skip


def test_wandb_offline_holds_what_metrics_jsonl_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    from tests.report.trackers.wandb_files import read_run

    sections = {
        "wandb": documented("wandb"),
        "checkpoint": {"checkpoints_dir": tmp_path / "kept", "checkpoint_period": 2},
    }
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, InterruptAt(), **sections)
    records = train(tmp_path, **sections)
    wandb.teardown()
    found = [read_run(path) for path in (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")]
    run, killed = sorted(found, key=lambda run: run.exit_code or 0)
    assert killed.run_id == run.run_id
    assert (killed.exit_code, run.exit_code) == (255, 0)
    expected = expected_points(records)
    resumed_from = min(update for _, update, _ in run.points) - 1
    assert resumed_from in (2, 3, 4)
    assert {point for point in expected if point[1] > resumed_from} == run.points
    assert run.config["learning_rate"]["initial_lr"] == 0.1
    assert run.summary["trained_model"] == str(tmp_path / "out" / "mlp_trained.onnx")

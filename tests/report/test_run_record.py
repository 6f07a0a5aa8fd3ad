"""`run.json` of a run: what it was, what came out, and how it ended; a resumed run keeps when it was started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from onward.environment import Environment
from onward.errors import StorageError
from onward.parameters import Parameters
from onward.report.run_record import RunRecord, describe_run, git_state, hyperparameters, resolved_yaml
from tests.report.events import evaluation_report, run_summary

PARAMETERS = Parameters.from_mapping(
    {
        "paths": {"model_path": "größe.onnx"}, "loss": {"type": "output", "prediction": "y"},
        "training": {"batch_size": 3, "num_train_steps": 1, "weights_to_train": ["a"]},
        "learning_rate": {"initial_lr": 0.5},
    }
)  # fmt: skip


def stored(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_what_came_out_is_kept(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "deep", resolved_yaml(PARAMETERS), {"command": ["x"]}, resumed_update=None)
    assert stored(tmp_path / "deep")["status"] == "running"
    record.on_evaluation(evaluation_report(7, {"loss": float("nan")}))
    record.on_end(run_summary(round=0))
    record.on_end(run_summary(round=0, steps=9))
    record.finish("done")
    record.close()
    found = stored(tmp_path / "deep")
    assert (found["status"], found["metrics"]["update"], found["command"]) == ("done", 7, ["x"])
    assert [one["steps"] for one in found["rounds"]] == [9]
    assert found["ended"] >= found["started"]
    assert [one.name for one in sorted((tmp_path / "deep").iterdir())] == ["resolved.yaml", "run.json"]


def test_a_run_that_is_closed_without_an_end_has_failed(tmp_path: Path) -> None:
    RunRecord(tmp_path, resolved_yaml(PARAMETERS), {}, resumed_update=None).close()
    assert stored(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(("is_resumed", "resumes"), [(True, 1), (False, 0)])
def test_a_run_that_continues_or_begins_anew(is_resumed: bool, resumes: int, tmp_path: Path) -> None:
    first = RunRecord(tmp_path, resolved_yaml(PARAMETERS), {}, resumed_update=None)
    first.record["started"] = "2001"
    first.on_evaluation(evaluation_report(7, {"loss": 1.0}))
    RunRecord(tmp_path, resolved_yaml(PARAMETERS), {}, resumed_update=4 if is_resumed else None)
    found = stored(tmp_path)
    assert len(found["resumed"]) == resumes
    assert found["resumed_update"] == (4 if is_resumed else None)
    assert (found["started"] == "2001") is is_resumed
    assert bool(found["metrics"]) is is_resumed


def test_a_resume_into_another_folder_is_recorded(tmp_path: Path) -> None:
    """Checkpoints may be of a run that wrote its record elsewhere, or nowhere."""
    RunRecord(tmp_path, resolved_yaml(PARAMETERS), {}, resumed_update=4)
    found = stored(tmp_path)
    assert (len(found["resumed"]), found["resumed_update"]) == (1, 4)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"the record of the run cannot be written to .*file.*: .*paths\.output_dir"):
        RunRecord(tmp_path / "file", resolved_yaml(PARAMETERS), {}, resumed_update=None)


def test_settings() -> None:
    assert yaml.safe_load(resolved_yaml(PARAMETERS))["paths"]["model_path"].endswith("größe.onnx")
    found = hyperparameters(PARAMETERS)
    assert found == {
        "loss.type": "output", "loss.prediction": "y", "training.batch_size": 3, "training.num_train_steps": 1,
        "training.weights_to_train": '["a"]', "learning_rate.initial_lr": 0.5,
    }  # fmt: skip


def test_a_folder_in_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    about = describe_run(Environment(execution_provider="CPU"), 2, tmp_path / "run.yaml", ["onward"])
    assert (about["git"], about["processes"], about["device"]) == (None, 2, "cpu")
    json.dumps(about)


def test_which_weights_were_written_is_kept(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, resolved_yaml(PARAMETERS), {}, resumed_update=None)
    record.on_trained_model("trained model of the best evaluation (loss 0.5 at step 3)", ["m.onnx", "m.onnx.data"])
    record.finish("done")
    assert stored(tmp_path)["trained_model"] == {
        "weights": "trained model of the best evaluation (loss 0.5 at step 3)",
        "files": ["m.onnx", "m.onnx.data"],
    }

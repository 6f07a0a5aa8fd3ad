"""Settings that the runs of a sweep were started with: kept, compared, and refused where they changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onward.commands.sweep_settings import FILE_NAME, refuse_changed, settings_of, write_settings
from onward.errors import ParametersError, StorageError
from onward.parameters import Parameters
from onward.report.run_folder import RECORD_NAME


def begun(folder: Path, settings: dict[str, Any], status: str = "done") -> Path:
    write_settings(folder, settings)
    (folder / RECORD_NAME).write_text(json.dumps({"status": status}))
    return folder


def test_what_may_change_a_result() -> None:
    sections = {
        "paths": {"model_path": "/base/net.onnx", "output_dir": "/base/out"},
        "loss": {"type": "output", "prediction": "y"}, "learning_rate": {"initial_lr": 0.5},
        "training": {"batch_size": 1, "num_train_steps": 2, "weights_to_train": ["a", "b"]},
    }  # fmt: skip
    found = settings_of(Parameters.from_mapping(sections), Path("/base"))
    assert found["paths.model_path"] == "net.onnx"
    assert found["learning_rate.initial_lr"] == 0.5
    assert (found["training.weights_to_train[0]"], found["training.weights_to_train[1]"]) == ("a", "b")
    assert not [name for name in found if name.startswith(("paths.output_dir", "checkpoint.", "wandb."))]


def test_the_same_settings_are_taken(tmp_path: Path) -> None:
    settings = {"a": 0.1, "b": [1, "ä"], "c": float("inf"), "d": None}
    refuse_changed({begun(tmp_path / "0", settings): settings, tmp_path / "new": settings})


def test_runs_that_failed_or_left_nothing_begin_anew(tmp_path: Path) -> None:
    refuse_changed({begun(tmp_path / "0", {"a": 1}, "failed"): {"a": 2}})
    (tmp_path / "0" / RECORD_NAME).unlink()
    refuse_changed({tmp_path / "0": {"a": 2}})
    (tmp_path / "0" / FILE_NAME).write_text("nonsense")
    refuse_changed({tmp_path / "0": {"a": 2}})


def test_changed_added_and_removed_fields_are_named(tmp_path: Path) -> None:
    members = {begun(tmp_path / str(n), {"a": 1, "gone": 3}): {"a": 2, "new": True} for n in range(2)}
    with pytest.raises(ParametersError) as caught:
        refuse_changed({**members, tmp_path / "2": {"a": 2}})
    assert str(caught.value).startswith(
        "2 of the 3 runs of this sweep were trained with other settings: a was 1, is now 2; new was None, is now True; "
        "gone was 3, is now None. "
    )


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/0' of a run of the sweep cannot be written: Not a directory\. Make"):
        write_settings(tmp_path / "file" / "0", {})

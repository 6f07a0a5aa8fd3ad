"""Fields that differ between two runs: none where nothing does, whatever a run finds out; else each by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onward.data.in_memory import InMemoryDataLoader
from onward.parameters.changes import changed_fields, flat_fields, notes_on_changes
from tests.mlp import data, parameters, start

RECORD = "the checkpoint was trained with other fields: "


def test_fields_are_flat_and_paths_relative() -> None:
    nested = {"a": {"b": [1, {"c": "/base/x"}], "d": {}}, "e": None}
    assert dict(flat_fields(nested, base="/base/")) == {"a.b[0]": 1, "a.b[1].c": "x", "a.d": {}, "e": None}


def test_changed_fields_are_those_of_either_side() -> None:
    assert changed_fields({"a": 1, "b": 2}, {"a": 1, "c": (3,)}) == {"c": (None, [3]), "b": (2, None)}
    assert changed_fields({"a": [1]}, {"a": (1,)}) == {}, "a checkpoint's record is JSON"


def test_a_note_names_what_changed_and_counts_steps(tmp_path: Path) -> None:
    earlier = parameters(tmp_path, training={"num_train_steps": 4})
    now = parameters(tmp_path, training={"num_train_steps": 8, "batch_size": 2}, speed={"fuse": False})
    record = {"parameters": earlier.to_mapping(), "counters": {"round": 0}}
    assert notes_on_changes([earlier], record, 4) == []
    (note,) = notes_on_changes([now], record, 4)
    assert note == (
        f"{RECORD}training.batch_size was {earlier.training.batch_size}, is now 2; training.num_train_steps was 4, is "
        "now 8. They hold from here on; steps are counted from the start of the run, and 4 of 8 are done. To start "
        "a new run from these weights, export them (onward export MODEL --checkpoint DIR -o START.onnx) and train that "
        "file with another checkpoint.checkpoints_dir."
    )
    assert notes_on_changes([now], {"counters": {"round": 0}}, 4) == [], "a checkpoint from before records held them"
    assert notes_on_changes([now], {**record, "counters": {"round": 1}}, 4) == [], "of a round that is not asked for"


def train(folder: Path, **sections: Any) -> list[str]:
    runner, recorder = start(folder, **{"checkpoint": {"checkpoints_dir": folder / "kept"}, **sections})
    runner.run(InMemoryDataLoader(data(32)))
    return [text for text in recorder.messages if text.startswith(RECORD)]


@pytest.mark.parametrize(
    "training",
    [{}, {"num_epochs": 1.0, "num_train_steps": None}, {"find_batch_size": True}, {"gradient_accumulation_steps": 2}],
    ids=str,
)
def test_a_run_that_resumes_as_it_was_reports_nothing(training: dict[str, Any], tmp_path: Path) -> None:
    assert train(tmp_path, training=training) == []
    assert train(tmp_path, training=training, tensorboard={"log_dir": tmp_path / "tb"}) == []


def test_a_run_that_resumes_with_another_rate_says_so(tmp_path: Path) -> None:
    train(tmp_path)
    (note,) = train(tmp_path, learning_rate={"initial_lr": 0.05})
    assert note.startswith(f"{RECORD}learning_rate.initial_lr was 0.1, is now 0.05. They hold")

"""From which checkpoint a run resumes where some are damaged: it says so, or refuses, and loses nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onward.checkpoint.reading import find_checkpoint
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import CheckpointError
from tests.checkpoint.trained_runs import RUN, TRAIN, trained
from tests.mlp import assert_same_bits, start, state_bits


def resume(folder: Path, if_damaged: str = "refuse", steps: int = 8) -> tuple[Any, Any]:
    checkpoint = {"checkpoints_dir": folder / "c", "checkpoint_period": 2, "max_num_checkpoints": 3}
    checkpoint["if_damaged"] = if_damaged
    return start(folder, **RUN, checkpoint=checkpoint, training={"num_train_steps": steps})


def without_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def broken_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": ', '"step": 1', 1))


def cut_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def without_data(path: Path) -> None:
    (path / "rank-00000.safetensors").unlink()


def flipped_data(path: Path) -> None:
    content = bytearray((path / "rank-00000.safetensors").read_bytes())
    generator = random.Random(5)
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    (path / "rank-00000.safetensors").write_bytes(content)


DAMAGES = [broken_manifest, cut_manifest, without_data, flipped_data]


def test_a_newest_checkpoint_without_manifest_is_reported_and_kept(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    without_manifest(folder / "checkpoint-00000008")
    runner, recorder = resume(tmp_path)
    assert recorder.messages[:2] == [
        f"{folder}/checkpoint-00000008 is incomplete: it has no manifest.json, which is written last. It is left out, "
        "and kept as damaged-checkpoint-00000008.",
        f"resumed from {folder}/checkpoint-00000006: round 0, step 6, 6 updates done.",
    ]
    runner.run(InMemoryDataLoader(TRAIN))
    runner.end_training()
    assert (folder / "damaged-checkpoint-00000008" / "rank-00000.safetensors").is_file()
    (tmp_path / "whole").mkdir()
    whole, _ = start(tmp_path / "whole", **RUN)
    whole.run(InMemoryDataLoader(TRAIN))
    assert_same_bits(state_bits(runner), state_bits(whole))


def test_training_does_not_begin_anew_over_checkpoints_without_manifest(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    for path in folder.iterdir():
        without_manifest(path)
    names = sorted(path.name for path in folder.iterdir())
    for if_damaged in ("refuse", "earlier"):
        with pytest.raises(CheckpointError) as caught:
            resume(tmp_path, if_damaged)
        assert "checkpoint-00000008 is incomplete: it has no manifest.json" in str(caught.value)
        assert f"There is no undamaged checkpoint in {folder}, and training would start over." in str(caught.value)
        assert "set checkpoint.if_damaged to restart to start over" in str(caught.value)
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == names
    runner, recorder = resume(tmp_path, "restart")
    assert runner.state.counters.update == 0
    assert runner.resumed_update is None
    assert sum("is left out, and kept as damaged-checkpoint" in text for text in recorder.messages) == 3


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_newest_checkpoint_is_refused_unless_asked(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = trained(tmp_path)
    damage(folder / "checkpoint-00000008")
    with pytest.raises(CheckpointError, match=r"set checkpoint\.if_damaged to earlier to resume from"):
        resume(tmp_path)
    assert sorted(path.name for path in folder.glob("*check*")) == [f"checkpoint-0000000{n}" for n in (4, 6, 8)]
    runner, recorder = resume(tmp_path, "earlier")
    assert runner.state.counters.update == 6
    assert recorder.messages[0].endswith("It is left out, and kept as damaged-checkpoint-00000008.")
    assert (folder / "damaged-checkpoint-00000008").is_dir()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_all_checkpoints_are_damaged(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = trained(tmp_path)
    for path in folder.iterdir():
        damage(path)
    for if_damaged in ("refuse", "earlier"):
        with pytest.raises(CheckpointError):
            resume(tmp_path, if_damaged)
    runner, _ = resume(tmp_path, "restart")
    assert runner.state.counters.update == 0
    assert len(list(folder.glob("damaged-checkpoint-*"))) == 3


def test_a_newest_incomplete_checkpoint_is_not_exported_over(tmp_path: Path) -> None:
    """Whoever names a folder gets its newest checkpoint, or an error."""
    folder = trained(tmp_path)
    without_manifest(folder / "checkpoint-00000008")
    with pytest.raises(CheckpointError, match=r"checkpoint-00000008 is newer than .*, but incomplete"):
        find_checkpoint(folder)


def test_a_run_that_saves_nothing_any_more_still_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    """Killed while the oldest checkpoint was being removed, after the last update; found by random kills."""
    folder = trained(tmp_path)
    (folder / ".tmp-onward-removed-checkpoint-00000002").mkdir()
    (folder / ".tmp-x").mkdir()
    resume(tmp_path, "refuse")
    assert [path.name for path in folder.glob(".tmp*")] == [".tmp-x"]

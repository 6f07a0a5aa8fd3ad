"""A run that fails on its way loses no update: what was trained before is saved, and continues to the same bits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.checkpoint import collective_save
from onward.checkpoint.reading import list_checkpoints
from onward.data.in_memory import InMemoryDataLoader
from onward.engine.callbacks import Callback
from onward.engine.reports import UpdateReport
from onward.errors import DataError
from tests.mlp import assert_same_bits, data, save_mlp, start, state_bits

TRAIN, TEST = data(30), data(11, seed=1)


def loader(features: dict[str, np.ndarray] = TRAIN) -> InMemoryDataLoader:
    return InMemoryDataLoader(features)


def broken(features: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    """The same data with a label that no class has."""
    label = features["label"].copy()
    label[row] = 99
    return {**features, "label": label}


@pytest.mark.parametrize("row", [21, 17], ids=["at an update", "between two updates"])
def test_what_was_trained_before_broken_data_is_saved(tmp_path: Path, row: int) -> None:
    """An error in step 5 or 6 leaves a checkpoint of step 4, the last update; with fixed data the run continues from
    it, to the same bits as one that never met an error."""
    checkpoint = {"checkpoints_dir": tmp_path / "c"}
    changes: dict[str, Any] = {
        "training": {"gradient_accumulation_steps": 2},
        "optimizer": {"training_optimizer_name": "AdamW"},
    }
    save_mlp(tmp_path, dropout=0.25, normalized=True)
    whole, losses = start(tmp_path, **changes)
    whole.run(loader())
    runner, _ = start(tmp_path, **changes, checkpoint=checkpoint)
    with pytest.raises(DataError, match="holds the label 99") as caught:
        runner.run(loader(broken(TRAIN, row)))
    path = tmp_path / "c" / "checkpoint-00000002"
    assert caught.value.__notes__ == [
        f"The steps before, to step 4, are saved as {path}. The same command resumes from there."
    ]
    resumed, recorder = start(tmp_path, **changes, checkpoint=checkpoint)
    resumed.run(loader())
    assert [report.step for report in recorder.steps] == [6, 8]
    assert recorder.losses == losses.losses[2:]
    assert_same_bits(state_bits(resumed), state_bits(whole))


def test_a_runner_that_met_broken_data_can_go_on_by_itself(tmp_path: Path) -> None:
    """Without checkpoints too: the gradients of a window that failed are forgotten."""
    changes: dict[str, Any] = {"training": {"gradient_accumulation_steps": 4}}
    save_mlp(tmp_path, dropout=0.25, normalized=True)
    whole, _ = start(tmp_path, **changes)
    whole.run(loader())
    runner, _ = start(tmp_path, **changes)
    with pytest.raises(DataError):
        runner.run(loader(broken(TRAIN, 26)))
    assert runner.state.counters.step == 4
    runner.run(loader())
    assert_same_bits(state_bits(runner), state_bits(whole))


def test_broken_data_before_the_first_update_leave_nothing_behind(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, checkpoint={"checkpoints_dir": tmp_path / "c"})
    with pytest.raises(DataError) as caught:
        runner.run(loader(broken(TRAIN, 1)))
    assert not hasattr(caught.value, "__notes__")
    assert list((tmp_path / "c").glob("checkpoint-*")) == []


def test_broken_test_data_cost_no_training(tmp_path: Path) -> None:
    training = {"evaluation_period": 3}
    runner, first = start(tmp_path, training=training, checkpoint={"checkpoints_dir": tmp_path / "c"})
    with pytest.raises(DataError, match="holds the label 99"):
        runner.run(loader(), loader(broken(TEST, 1)))
    resumed, recorder = start(tmp_path, training=training, checkpoint={"checkpoints_dir": tmp_path / "c"})
    assert recorder.messages == [f"resumed from {tmp_path}/c/checkpoint-00000003: round 0, step 3, 3 updates done."]
    summary = resumed.run(loader(), loader(TEST))
    assert (summary.steps, summary.steps_before, summary.updates_before, summary.samples_before) == (5, 3, 3, 12)
    assert summary.first_loss_of_round == first.steps[0].loss


def test_a_profile_ends_with_the_step_that_fails(tmp_path: Path) -> None:
    """What was measured before is written, and another profile can begin."""
    profiler = {"first_step": 2, "last_step": 7, "trace_dir": tmp_path / "profile"}
    runner, recorder = start(tmp_path, profiler=profiler)
    with pytest.raises(DataError):
        runner.run(loader(broken(TRAIN, 17)))
    assert recorder.messages[0].startswith("profile of steps 2 to 4: ")
    again, others = start(tmp_path, profiler=profiler)
    again.run(loader())
    assert others.messages[0].startswith("profile of steps 2 to 7: ")


def test_what_is_being_written_at_ctrl_c_is_complete_when_the_caller_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk: the checkpoint of update 2 takes longer than the two updates to the interrupt."""

    class CtrlC(Callback):
        def on_update(self, report: UpdateReport) -> None:
            if report.update == 4:
                raise KeyboardInterrupt

    save_together = collective_save.save_together

    def slowly(*arguments: Any) -> None:
        time.sleep(1)
        save_together(*arguments)

    monkeypatch.setattr(collective_save, "save_together", slowly)
    kept = {"checkpoints_dir": tmp_path / "kept", "checkpoint_period": 2}
    runner, _ = start(tmp_path, CtrlC(), checkpoint=kept)
    with pytest.raises(KeyboardInterrupt):
        runner.run(loader())
    assert [path.name for path in list_checkpoints(tmp_path / "kept")] == ["checkpoint-00000002"]
    resumed, _ = start(tmp_path, checkpoint=kept)
    assert resumed.state.counters.update == 2

"""Rounds and resumption: what continues, what starts anew, and runs that were cut in two ending with the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from onward.checkpoint.reading import read_record
from onward.data.in_memory import InMemoryDataLoader
from onward.data.loader import DataLoader
from onward.engine.reports import StepReport
from onward.errors import CheckpointError, ParametersError
from onward.runner import TrainingRunner
from tests.mlp import (
    SQUARES,
    assert_same_bits,
    data,
    parameters,
    save_mlp,
    start,
    state_bits,
    weights_of,
    write_shards,
)

TRAIN, OTHER, TEST = data(30), data(22, seed=4), data(11, seed=1)


def loader(features: dict[str, np.ndarray] = TRAIN, **options: Any) -> InMemoryDataLoader:
    return InMemoryDataLoader(features, **options)


class StopAt(BaseException):
    """Ends a run in the middle, as a crash would: nobody catches it."""


class Crash:
    """A watcher's twin that the runner calls directly: raises after a number of reports."""

    def __init__(self, runner: TrainingRunner, step: int) -> None:
        runner.watchers.on_step = self.on_step  # type: ignore[method-assign]
        self.step = step

    def on_step(self, report: StepReport) -> None:
        if report.step == self.step:
            raise StopAt


# ------------------------------------------------------------------------------------------------------------- rounds


def test_a_second_round_on_other_data(tmp_path: Path) -> None:
    """The update continues counting, the step starts again, and the schedule with it; moments stay."""
    adam = {"training_optimizer_name": "Adam"}
    runner, recorder = start(
        tmp_path, optimizer=adam, training={"num_train_steps": 6, "gradient_accumulation_steps": 2}
    )
    first = runner.run(loader())
    rate = {"initial_lr": 0.01, "warmup_mode": "linear", "warmup_steps": 2}
    later = parameters(tmp_path, optimizer=adam, learning_rate=rate, training={"num_train_steps": 4, "batch_size": 3})
    runner.update_parameters(later)
    assert runner.round == 1
    second = runner.run(loader(OTHER))
    assert (first.round, first.steps, first.updates, first.samples) == (0, 6, 3, 24)
    assert (second.round, second.steps, second.updates, second.samples, second.batch_size) == (1, 4, 4, 12, 3)
    assert [(r.round, r.step, r.update, r.samples) for r in recorder.steps] == [
        (0, 2, 1, 8), (0, 4, 2, 16), (0, 6, 3, 24), (1, 1, 4, 3), (1, 2, 5, 6), (1, 3, 6, 9), (1, 4, 7, 12),
    ]  # fmt: skip
    np.testing.assert_allclose([r.learning_rate for r in recorder.steps[3:]], [0.005, 0.01, 0.005, 0.0], atol=1e-12)
    assert float(state_bits(runner)["slots/step/w1"]) == 7
    assert runner.round == 2


def test_the_second_round_trains_as_one_with_the_state_of_the_first(tmp_path: Path) -> None:
    """A round on other data is its own run that begins with the weights and moments of the one before."""
    runner, _ = start(tmp_path, optimizer={"training_optimizer_name": "AdamW"})
    runner.run(loader())
    bits = state_bits(runner)
    runner.run(loader(OTHER))
    fresh, _ = start(tmp_path, optimizer={"training_optimizer_name": "AdamW"})
    with torch.no_grad():
        for name, tensor in ((n, p.tensor) for n, p in fresh.state.sharded_tensors().items()):
            tensor.copy_(bits[name])
    fresh.run(loader(OTHER))
    assert_same_bits(state_bits(fresh), state_bits(runner))


def test_what_cannot_change_between_rounds_is_named(tmp_path: Path) -> None:
    runner, _ = start(tmp_path)
    later = parameters(tmp_path, loss=SQUARES, training={"seed": 3}, optimizer={"max_norm_clip": 1.0})
    with pytest.raises(ParametersError) as caught:
        runner.update_parameters(later)
    assert str(caught.value) == (
        "training.seed, loss, optimizer cannot change between rounds of one run; start another TrainingRunner."
    )
    assert runner.parameters == parameters(tmp_path)
    with pytest.raises(ParametersError, match=r"^tensorboard names 'w7': neither a value"):
        runner.update_parameters(parameters(tmp_path, tensorboard={"norm_names": ["w7"]}))


def test_the_loss_scale_can_begin_anew(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, mixed_precision={"use_mixed_precision": True})
    runner.run(loader())
    assert runner.state.loss_scale is not None
    assert (runner.state.loss_scale.scale, runner.state.loss_scale.finite_updates) == (32768.0, 7)  # one overflow
    runner.reset_loss_scale()
    assert (runner.state.loss_scale.scale, runner.state.loss_scale.finite_updates) == (65536.0, 0)


# --------------------------------------------------------------------------------------------------------- resumption

HARD: dict[str, Any] = {
    "data": {"shuffle_data": True},
    "training": {
        "num_train_steps": 24, "gradient_accumulation_steps": 2, "batch_size": 4, "seed": 5,
        "weights_not_to_train": ["b1"],
    },
    "learning_rate": {"initial_lr": 0.01, "warmup_mode": "cosine", "warmup_steps": 6},
    "optimizer": {"training_optimizer_name": "AdamW", "max_norm_clip": 1.0},
    "mixed_precision": {"use_mixed_precision": True},
}  # fmt: skip
"""30 samples in batches of 4, shuffled, so that epochs end within batches; dropout, running statistics, fp16."""


def hard_run(
    folder: Path, name: str, stop_at: int | None = None, **checkpoint: Any
) -> tuple[TrainingRunner, list[float]]:
    """Trains, perhaps to a crash; gives the runner and the losses it showed."""
    runner, recorder = start(folder, **HARD, checkpoint={"checkpoints_dir": folder / name, **checkpoint})
    with DataLoader({}, folder / "shards", shuffle=True, seed=5) as source:
        if stop_at is None:
            runner.run(source)
        else:
            Crash(runner, stop_at)
            with pytest.raises(StopAt):
                runner.run(source)
            runner._initialized().checkpoints.close()
    return runner, recorder.losses


@pytest.fixture
def hard(tmp_path: Path) -> Path:
    save_mlp(tmp_path, dropout=0.25, normalized=True)
    write_shards(tmp_path / "shards", TRAIN, files=3)
    return tmp_path


@pytest.mark.parametrize("stop_at", [10, 16])
def test_a_run_cut_in_two_ends_with_the_same_bits(hard: Path, stop_at: int) -> None:
    """Cut in the middle of an epoch (of 7.5 batches), one update after the last checkpoint."""
    whole, losses = hard_run(hard, "whole")
    hard_run(hard, "cut", stop_at=stop_at, checkpoint_period=(stop_at - 2) // 2)
    resumed, rest = hard_run(hard, "cut")
    saved = stop_at - 2
    assert rest == losses[saved // 2 :]
    assert_same_bits(state_bits(resumed), state_bits(whole))
    assert resumed.state.record() == whole.state.record()
    assert resumed.resumed_update == saved // 2


def test_resuming_from_a_checkpoint_given_by_path(hard: Path) -> None:
    """Both a checkpoint and a folder of them; one in checkpoints_dir comes before it."""
    whole, losses = hard_run(hard, "whole")
    hard_run(hard, "cut", stop_at=10, checkpoint_period=4)
    for number, path in enumerate((hard / "cut", hard / "cut" / "checkpoint-00000004")):
        resumed, rest = hard_run(hard, f"resumed{number}", checkpoint_to_load_path=path)
        assert rest == losses[4:]
        assert_same_bits(state_bits(resumed), state_bits(whole))
    again, rest = hard_run(hard, "resumed0", checkpoint_to_load_path=hard / "cut")
    assert again.resumed_update == 12


def test_what_resuming_says(hard: Path) -> None:
    hard_run(hard, "cut", stop_at=10, checkpoint_period=4)
    _, recorder = start(hard, **HARD, checkpoint={"checkpoints_dir": hard / "cut"})
    assert recorder.messages[-1] == (f"resumed from {hard}/cut/checkpoint-00000004: round 0, step 8, 4 updates done.")


def test_counters_and_parameters_are_in_the_checkpoint(hard: Path) -> None:
    hard_run(hard, "cut", stop_at=10, checkpoint_period=4)
    record = read_record(hard / "cut" / "checkpoint-00000004")
    counters = {"step": 8, "round": 0, "update": 4, "skipped_updates": 1, "samples": 32, "ended_early_of": 0}
    assert record["counters"] == counters
    assert record["cursor"]["epoch"] == 1
    assert record["cursor"]["sample"] == 2
    assert (record["loss_scale"]["scale"], record["loss_scale"]["finite_updates"]) == (32768.0, 2)
    assert record["parameters"]["training"]["batch_size"] == 4


def test_a_second_round_resumes(tmp_path: Path) -> None:
    """Stopped in its second round, a run continues there; a checkpoint of the first round's end starts the second."""

    def train(name: str, stop_in_second: int | None = None) -> TrainingRunner:
        checkpoint = {"checkpoints_dir": tmp_path / name, "checkpoint_period": 2, "max_num_checkpoints": 2}
        first = parameters(tmp_path, checkpoint=checkpoint)
        runner, _ = start(tmp_path, checkpoint=checkpoint)
        assert runner.parameters == first
        if runner.round == 0:
            runner.run(loader())
        runner.update_parameters(parameters(tmp_path, checkpoint=checkpoint, training={"batch_size": 3}))
        if stop_in_second is not None:
            Crash(runner, stop_in_second)
            with pytest.raises(StopAt):
                runner.run(loader(OTHER))
            runner._initialized().checkpoints.close()
        else:
            runner.run(loader(OTHER))
        return runner

    save_mlp(tmp_path, dropout=0.25)
    whole = train("whole")
    for step, resumed_from in ((1, 8), (6, 12)):
        train(f"cut{step}", stop_in_second=step)
        resumed = train(f"cut{step}")
        assert resumed.resumed_update == resumed_from
        assert_same_bits(state_bits(resumed), state_bits(whole))


def test_more_steps_than_before_go_on_where_the_run_ended(tmp_path: Path) -> None:
    checkpoint = {"checkpoints_dir": tmp_path / "c"}
    save_mlp(tmp_path, dropout=0.25)
    whole, _ = start(tmp_path, training={"num_train_steps": 12})
    whole.run(loader())
    runner, _ = start(tmp_path, checkpoint=checkpoint)
    runner.run(loader())
    runner, recorder = start(tmp_path, checkpoint=checkpoint, training={"num_train_steps": 12})
    assert runner.round == 0
    summary = runner.run(loader())
    assert (summary.steps, recorder.steps[0].step) == (4, 9)
    assert_same_bits(weights_of(runner), weights_of(whole))


def test_a_finished_run_started_again_has_its_rounds_behind_it(tmp_path: Path) -> None:
    checkpoint = {"checkpoints_dir": tmp_path / "c"}
    out = {"output_dir": tmp_path / "out"}
    first, _ = start(tmp_path, checkpoint=checkpoint, paths=out)
    first.run(loader())
    report = first.end_training(loader(TEST))
    shutil.rmtree(tmp_path / "out")
    again, _ = start(tmp_path, checkpoint=checkpoint, paths=out)
    assert again.round == 1
    assert report is not None
    other = again.end_training(loader(TEST))
    assert other is not None
    assert (other.step, other.update, other.round, other.metrics) == (8, 8, 0, report.metrics)
    assert (tmp_path / "out" / "mlp_trained.onnx").is_file()


# ----------------------------------------------------------------------------------- checkpoints that are not one's own


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    checkpoint = {"checkpoints_dir": tmp_path / "c"}
    runner, _ = start(tmp_path, checkpoint=checkpoint)
    runner.run(loader())
    model = onnx.load(tmp_path / "mlp.onnx")
    for name, shape in (("w1", (6, 9)), ("b1", 9), ("w2", (9, 4))):
        index = [t.name for t in model.graph.initializer].index(name)
        model.graph.initializer[index].CopyFrom(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(model, tmp_path / "mlp.onnx")
    with pytest.raises(CheckpointError) as caught:
        start(tmp_path, checkpoint=checkpoint)
    assert "checkpoint-00000008 is a checkpoint of another model" in str(caught.value)
    assert "weights/w1" in str(caught.value)
    assert "[6, 8]" in str(caught.value)
    assert "[6, 9]" in str(caught.value)


def test_a_checkpoint_of_another_optimizer(tmp_path: Path) -> None:
    checkpoint = {"checkpoints_dir": tmp_path / "c"}
    runner, _ = start(tmp_path, checkpoint=checkpoint)
    runner.run(loader())
    with pytest.raises(CheckpointError) as caught:
        start(tmp_path, checkpoint=checkpoint, optimizer={"training_optimizer_name": "AdamOptimizer"})
    path = tmp_path / "c" / "checkpoint-00000008"
    said = str(caught.value)
    assert said.startswith(
        f"{path} holds other tensors than this run has, since fields were changed: optimizer.training_optimizer_name "
        "was 'SGDOptimizer', is now 'Adam'. Of "
    )
    assert "slots/exp_avg/w1" in said
    assert said.endswith(
        " Set the fields back to resume. To start from the checkpoint's weights with the new fields, export them "
        f"(onward export MODEL --checkpoint {path} -o START.onnx), and train that file with another "
        "checkpoint.checkpoints_dir."
    )


def test_a_checkpoint_of_other_trainable_weights(tmp_path: Path) -> None:
    kept = {"checkpoint": {"checkpoints_dir": tmp_path / "c"}, "optimizer": {"training_optimizer_name": "Adam"}}
    runner, _ = start(tmp_path, **kept)
    runner.run(loader())
    with pytest.raises(CheckpointError, match=r"changed: training\.weights_not_to_train was \[\], is now \['w1'\]\."):
        start(tmp_path, **kept, training={"weights_not_to_train": ["w1"]})


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"^the checkpoint .*/nowhere does not exist\. Expected a directory with a"
    ):
        start(tmp_path, checkpoint={"checkpoint_to_load_path": tmp_path / "nowhere"})


def test_a_static_loss_scale_asked_for_anew_is_taken(tmp_path: Path) -> None:
    checkpoint = {"checkpoints_dir": tmp_path / "c"}
    dynamic, _ = start(tmp_path, checkpoint=checkpoint, mixed_precision={"use_mixed_precision": True})
    dynamic.run(loader())
    for asked, scale, finite in ((0.0, 32768.0, 7), (128.0, 128.0, 0)):
        mixed = {"use_mixed_precision": True, "loss_scale": asked}
        runner, _ = start(tmp_path, checkpoint=checkpoint, mixed_precision=mixed)
        assert runner.state.loss_scale is not None
        assert (runner.state.loss_scale.scale, runner.state.loss_scale.finite_updates) == (scale, finite)


def test_updates_stay_as_many_with_another_accumulation(tmp_path: Path) -> None:
    checkpoint = {"checkpoints_dir": tmp_path / "c", "checkpoint_period": 3}
    training = {"num_train_steps": None, "num_updates": 6}
    runner, _ = start(tmp_path, checkpoint=checkpoint, training={**training, "gradient_accumulation_steps": 2})
    Crash(runner, 8)
    with pytest.raises(StopAt):
        runner.run(loader())
    runner._initialized().checkpoints.close()
    resumed, recorder = start(tmp_path, checkpoint=checkpoint, training={**training, "gradient_accumulation_steps": 3})
    resumed.run(loader())
    assert [(report.step, report.update) for report in recorder.steps] == [(9, 4), (12, 5), (15, 6)]
    assert not [message for message in recorder.messages if "now make" in message]
    again, recorder = start(tmp_path, checkpoint=checkpoint, training={**training, "gradient_accumulation_steps": 5})
    assert (again.state.counters.round, recorder.steps) == (1, [])  # it is over


def test_accumulation_cannot_change_between_two_of_its_updates(tmp_path: Path) -> None:
    """A run that continues from step 6 may accumulate over 2 or 3 steps, not over 4."""
    checkpoint = {"checkpoints_dir": tmp_path / "c", "checkpoint_period": 3}
    runner, _ = start(tmp_path, checkpoint=checkpoint, training={"gradient_accumulation_steps": 2})
    Crash(runner, 8)
    with pytest.raises(StopAt):
        runner.run(loader())
    runner._initialized().checkpoints.close()
    steps = {"num_train_steps": 12}
    resumed, _ = start(tmp_path, checkpoint=checkpoint, training={**steps, "gradient_accumulation_steps": 4})
    with pytest.raises(ParametersError) as caught:
        resumed.run(loader())
    assert str(caught.value) == (
        "training.gradient_accumulation_steps is 4, but the run resumes from step 6, which is not a multiple of it. "
        "Set the number that the run began with, or change it at the end of a round."
    )
    resumed, recorder = start(tmp_path, checkpoint=checkpoint, training={**steps, "gradient_accumulation_steps": 3})
    resumed.run(loader())
    assert [(report.step, report.update) for report in recorder.steps] == [(9, 4), (12, 5)]
    assert (
        "training.gradient_accumulation_steps is 3, and was 2 up to step 6: the 12 steps of training.num_train_steps "
        "now make 5 updates instead of 6. To make 6, set it to 15, or training.num_updates to 6."
    ) in recorder.messages

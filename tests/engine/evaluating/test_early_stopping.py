"""Early stopping, the best checkpoint and the model exported from it: by hand, resumed, killed, and on many ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.artifacts.trained_model import export_checkpoint
from onward.checkpoint.reading import checkpoint_number, list_checkpoints
from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.engine.evaluating.early_stopping import BestEvaluation
from onward.engine.reports import EvaluationReport
from onward.errors import OnwardError, ParametersError
from onward.parameters.evaluation import EarlyStopping
from onward.runner import TrainingRunner
from tests.initializers import stored_arrays
from tests.mlp import (
    assert_same_bits,
    cross_entropies,
    data,
    forward,
    save_mlp,
    start,
    state_bits,
    write_shards,
)  # fmt: skip
from tests.test_cli import write_run
from tests.watching import Recorder

TRAIN, TEST = data(24), data(12, seed=3)
TEST["label"][::2] = (TEST["label"][::2] + 1) % 4  # half of it nothing explains: the loss falls and then rises
STOPPING: dict[str, Any] = {
    "training": {"num_train_steps": 40, "evaluation_period": 2},
    "learning_rate": {"initial_lr": 0.1},
    "early_stopping": {"patience": 3},
}


def keeping(folder: Path, **checkpoint: Any) -> dict[str, Any]:
    return {**STOPPING, "checkpoint": {"checkpoints_dir": folder / "checkpoints", "keep_best": True, **checkpoint}}


def run(folder: Path, **changes: Any) -> tuple[TrainingRunner, Recorder]:
    runner, recorder = start(folder, **changes)
    if runner.round == 0:
        runner.run(InMemoryDataLoader(TRAIN), InMemoryDataLoader(TEST))
    return runner, recorder


def expected_stop(losses: list[float], patience: int) -> tuple[int, int]:
    """(evaluations until the stop, which of them was the best), by the definition."""
    best, best_at = math.inf, 0
    for number, loss in enumerate(losses, 1):
        if loss < best:
            best, best_at = loss, number
        elif number - best_at >= patience:
            return number, best_at
    return len(losses), best_at


@pytest.mark.parametrize("patience", [3, 5])
def test_a_run_stops_after_evaluations_without_improvement(tmp_path: Path, patience: int) -> None:
    free = {**STOPPING, "early_stopping": {}}
    _, whole = run(tmp_path, **free)
    losses = [report.metrics["loss"] for report in whole.evaluations]
    stops_at, best_at = expected_stop(losses, patience)
    assert 1 < best_at < stops_at < len(losses), "data on which nothing would be tested"
    _, recorder = run(tmp_path, **{**STOPPING, "early_stopping": {"patience": patience}})
    assert [report.metrics["loss"] for report in recorder.evaluations] == losses[:stops_at]
    (summary,) = recorder.summaries
    assert summary.steps == 2 * stops_at
    assert summary.stopped == (
        f"early stopping: loss did not improve in the last {patience} evaluations; best {losses[best_at - 1]:.4g} at "
        f"step {2 * best_at}"
    )


def feed(watcher: BestEvaluation, values: list[float], every: int = 1) -> list[bool]:
    """Whether each evaluation asked to stop; local SGD synchronizes every so many updates."""

    class Control:
        stopped = False

        def stop(self, reason: str) -> None:
            self.stopped = True

        def save_now(self) -> None:
            raise AssertionError("not asked to save")

    found = []
    watcher._is_running = True
    for number, value in enumerate(values, 1):
        watcher.control = Control()  # type: ignore[assignment]
        watcher.on_evaluation(
            EvaluationReport(
                step=number,
                update=number,
                round=0,
                metrics={"loss": value, "accuracy": value},
                samples=1,
                seconds=0.0,
                stale_updates=number % every,
            )
        )
        found.append(watcher.control.stopped)  # type: ignore[attr-defined]
    return found


def test_min_delta_mode_and_values_that_are_no_numbers() -> None:
    slow = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]
    assert feed(BestEvaluation(EarlyStopping(patience=2), False, False), slow) == [False] * 6
    watcher = BestEvaluation(EarlyStopping(patience=3, min_delta=0.25), False, False)
    assert feed(watcher, slow) == [False, False, False, False, False, False]  # 1.0, then 0.7 is the next improvement
    watcher = BestEvaluation(EarlyStopping(patience=2, min_delta=0.35), False, False)
    assert feed(watcher, slow) == [False, False, True, True, False, False]
    assert (watcher.best.value, watcher.best.step) == (0.5, 6)
    assert feed(BestEvaluation(EarlyStopping(patience=2), True, False), slow) == [False, False, True, True, True, True]
    nans = BestEvaluation(EarlyStopping(patience=2), False, False)
    assert feed(nans, [math.nan, math.nan]) == [False, True]
    assert nans.best.value is None
    infinite = BestEvaluation(EarlyStopping(patience=9), False, False)
    feed(infinite, [math.inf, math.inf])
    other = BestEvaluation(EarlyStopping(patience=9), False, False)
    other.load_state_dict(infinite.state_dict())
    assert other.best == infinite.best


def test_evaluations_of_the_same_weights_are_no_lack_of_improvement() -> None:
    """Local SGD that synchronizes every third update: the second one is of the first one's weights, and so on."""
    values = [1.0, 1.0, 0.9, 0.9, 0.9, 0.95, 0.95, 0.95, 0.97]
    watcher = BestEvaluation(EarlyStopping(patience=2), False, False)
    assert feed(watcher, values, every=3) == [False] * 8 + [True]
    assert (watcher.best.update, watcher.best.value) == (3, 0.9)
    assert feed(BestEvaluation(EarlyStopping(patience=2), False, False), values)[4]
    resumed = BestEvaluation(EarlyStopping(patience=2), False, False)
    resumed.load_state_dict(watcher.state_dict())
    assert resumed.best.weights_update == 9


def test_a_second_evaluation_of_an_update_takes_the_place_of_the_first() -> None:
    """A round of local SGD that ends early is synchronized and evaluated again; one checkpoint is kept of both."""
    watcher = BestEvaluation(EarlyStopping(patience=9), False, False)
    feed(watcher, [1.0, 0.5], every=3)
    watcher.best.update = 2
    watcher.on_evaluation(EvaluationReport(step=2, update=2, round=0, metrics={"loss": 0.8}, samples=1, seconds=0.0))
    assert (watcher.best.value, watcher.best.update) == (0.8, 2)


def test_the_best_checkpoint_is_kept_and_exported(tmp_path: Path) -> None:
    changes = keeping(tmp_path, export="best")
    changes["paths"] = {"output_dir": tmp_path / "out"}
    runner, recorder = run(tmp_path, **changes)
    runner.end_training(InMemoryDataLoader(TEST))
    losses = [report.metrics["loss"] for report in recorder.evaluations]
    best = recorder.evaluations[int(np.argmin(losses))]
    kept = {checkpoint_number(path) for path in list_checkpoints(tmp_path / "checkpoints")}
    last = runner.state.counters.update
    assert kept == {best.update, last}
    assert best.update < last
    exported = stored_arrays(tmp_path / "out" / "mlp_trained.onnx")
    found = cross_entropies(forward(TEST["x"], exported), TEST["label"]).mean()
    assert found == pytest.approx(min(losses), rel=1e-6)
    assert recorder.messages[-1] == (
        f"trained model of the best evaluation (loss {min(losses):.4g} at step {best.step}) written to "
        f"{tmp_path / 'out' / 'mlp_trained.onnx'}."
    )
    export_checkpoint(
        tmp_path / "mlp.onnx", tmp_path / "checkpoints" / f"checkpoint-{best.update:08d}", tmp_path / "b.onnx"
    )
    again = stored_arrays(tmp_path / "b.onnx")
    assert all(np.array_equal(again[name], value) for name, value in exported.items())


def test_a_last_evaluation_that_is_the_best_is_exported(tmp_path: Path) -> None:
    """Six steps, evaluated every four: the last weights are evaluated only when training is over."""
    changes = keeping(tmp_path, export="best")
    changes |= {"training": {"num_train_steps": 6, "evaluation_period": 4}, "paths": {"output_dir": tmp_path / "out"}}
    runner, recorder = run(tmp_path, **changes)
    runner.end_training(InMemoryDataLoader(TRAIN))
    last = recorder.evaluations[-1]
    assert recorder.messages[-1] == (
        f"trained model of the best evaluation (loss {last.metrics['loss']:.4g} at step 6, the last one) written to "
        f"{tmp_path / 'out' / 'mlp_trained.onnx'}."
    )
    exported = stored_arrays(tmp_path / "out" / "mlp_trained.onnx")
    assert all(np.array_equal(exported[name], tensor.detach().numpy()) for name, tensor in runner.net.weights.items())


def test_every_nth_checkpoint_is_kept(tmp_path: Path) -> None:
    checkpoint = {"checkpoints_dir": tmp_path / "checkpoints", "checkpoint_period": 1, "keep_every": 3}
    runner, _ = start(tmp_path, training={"num_train_steps": 8}, checkpoint=checkpoint)
    runner.run(InMemoryDataLoader(TRAIN))
    assert [checkpoint_number(path) for path in list_checkpoints(tmp_path / "checkpoints")] == [3, 6, 8]


@pytest.mark.parametrize("interrupted_at", [3, 9, 13])
def test_a_resumed_run_stops_where_the_whole_one_does(tmp_path: Path, interrupted_at: int) -> None:
    class Killed(Exception):
        pass

    class Killing(InMemoryDataLoader):
        def batches(self, *arguments: Any) -> Any:
            for number, batch in enumerate(super().batches(*arguments)):
                if number == interrupted_at:
                    raise Killed
                yield batch

    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        save_mlp(tmp_path / name)
    whole, expected = run(tmp_path / "whole", **keeping(tmp_path / "whole"))
    changes = keeping(tmp_path / "parts", checkpoint_period=3)
    runner, _ = start(tmp_path / "parts", **changes)
    with pytest.raises(Killed):
        runner.run(Killing(TRAIN), InMemoryDataLoader(TEST))
    resumed, recorder = run(tmp_path / "parts", **changes)
    assert any(message.startswith("resumed from") for message in recorder.messages)
    assert recorder.summaries[0].stopped == expected.summaries[0].stopped is not None
    assert resumed.best is not None
    assert whole.best is not None
    assert resumed.best.best == whole.best.best
    assert_same_bits(state_bits(resumed), state_bits(whole))
    again, recorder = run(tmp_path / "parts", **changes)  # over is over
    assert again.round == 1
    assert recorder.summaries == []


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_mlp(tmp_path)
    write_shards(tmp_path / "train", TRAIN)
    write_shards(tmp_path / "test", TEST)
    path = write_run(
        tmp_path,
        **{**STOPPING, "early_stopping": {"metric": "accuracy", "patience": 2}},
        checkpoint={"checkpoints_dir": "out/checkpoints", "keep_best": True, "export": "best"},
    )
    assert main(["train", str(path)]) == 0
    said = capsys.readouterr().out
    assert "early stopping: accuracy did not improve in the last 2 evaluations; best" in said
    assert "trained model of the best evaluation (accuracy" in said
    best, last = list_checkpoints(tmp_path / "out" / "checkpoints")
    export = ["export", str(tmp_path / "mlp.onnx"), "-o", str(tmp_path / "e.onnx"), "--checkpoint"]
    assert main([*export, str(last.parent)]) == 0
    told = f"the checkpoint is {last.name}, the latest in {last.parent}. That of the best evaluation is {best.name}: "
    assert f"note   {told}pass --checkpoint {best} to take it." in capsys.readouterr().err
    assert main([*export, str(best)]) == 0
    assert "the checkpoint is" not in capsys.readouterr().err
    assert main(["train", str(path), "--early_stopping.metric", "loss"]) == 0
    assert (
        "trained model with the last weights, for want of an evaluation to compare by loss" in capsys.readouterr().out
    )


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing evaluated": (
        {"early_stopping": {"patience": 3}},
        r"^early_stopping\.patience is 3, but training\.evaluation_period is 0, so that nothing is evaluated",
    ),
    "evaluation skipped": (
        {**STOPPING, "training": {"skip_evaluation": True, "evaluation_period": 2}},
        r"^early_stopping\.patience is 3, but training\.skip_evaluation is true; leave one of the two out\.$",
    ),
    "between updates": (
        {**STOPPING, "training": {"gradient_accumulation_steps": 4, "evaluation_period": 6}},
        r"^early_stopping\.patience is 3, but training\.evaluation_period is 6, not a multiple .* is 4; use 8\.$",
    ),
    "nowhere to keep": (
        {**STOPPING, "checkpoint": {"keep_best": True}},
        r"^checkpoint\.keep_best is true, but checkpoint\.checkpoints_dir is missing; set where checkpoints go\.$",
    ),
    "nothing kept": (
        {"checkpoint": {"export": "best"}},
        r"^checkpoint\.export is best, but checkpoint\.keep_best is false, so that the best weights are not kept; set",
    ),
    "unknown metric": (
        {**STOPPING, "early_stopping": {"patience": 3, "metric": "f1"}},
        r"^early_stopping\.metric is 'f1', which evaluations do not compute; expected one of loss, accuracy\. Set",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused_before_training(tmp_path: Path, mistake: str) -> None:
    changes, words = MISTAKES[mistake]
    with pytest.raises(ParametersError, match=words):
        start(tmp_path, **changes)


def test_without_test_data_nothing_can_be_compared(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, **STOPPING)
    with pytest.raises(
        OnwardError, match=r"^early_stopping\.patience and checkpoint\.keep_best compare evaluations, but"
    ):
        runner.run(InMemoryDataLoader(TRAIN))

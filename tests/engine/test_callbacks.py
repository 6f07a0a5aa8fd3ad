"""Callbacks: what each hook is given, what a control does to a run, what an exception in one does, exact resume."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.checkpoint.reading import find_latest, read_record
from onward.data.batches import Batch
from onward.data.in_memory import InMemoryDataLoader
from onward.engine.callbacks import Callback
from onward.engine.reports import EpochReport, EvaluationReport, RunStart, StepReport, UpdateReport
from onward.errors import DataError, ParametersError
from onward.parallel.launch.process import start as start_mesh
from onward.parameters.distributed import Distributed
from onward.runner import TrainingRunner
from onward.training_round import TrainingRound
from tests.mlp import (
    ON_ONE_THREAD,
    assert_same_bits,
    data,
    parameters,
    save_mlp,
    start,
    state_bits,
    weights_of,
)
from tests.ranks import run_on_ranks

TRAIN = data(32)
TEST = data(11, seed=1)
ADAM = {"training_optimizer_name": "Adam"}


def loader(features: Mapping[str, np.ndarray] = TRAIN, **options: Any) -> InMemoryDataLoader:
    return InMemoryDataLoader(features, **options)


class Diary(Callback):
    """Every event by name and with what it is about."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.updates: list[UpdateReport] = []

    def on_run_start(self, start: RunStart) -> None:
        self.events.append(("start", start.step, start.num_train_steps, start.batch_size))

    def on_batch(self, batch: Batch) -> None:
        self.events.append(("batch", batch.sample_count))

    def on_update(self, report: UpdateReport) -> None:
        self.updates.append(report)
        self.events.append(("update", report.update))

    def on_step(self, report: StepReport) -> None:
        self.events.append(("step", report.step))

    def on_epoch_end(self, report: EpochReport) -> None:
        self.events.append(("epoch", report.epoch, report.step))

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.events.append(("evaluation", report.step))

    def on_checkpoint(self, report: Any) -> None:
        self.events.append(("checkpoint", report.step))

    def on_end(self, summary: Any) -> None:
        self.events.append(("end", summary.steps, summary.stopped))

    def on_exception(self, error: BaseException) -> None:
        self.events.append(("exception", type(error).__name__))

    def close(self) -> None:
        self.events.append(("close",))


def test_every_hook_is_called_in_order(tmp_path: Path) -> None:
    diary = Diary()
    changes: dict[str, Any] = {
        "training": {
            "num_train_steps": 4,
            "batch_size": 8,
            "gradient_accumulation_steps": 2,
            "display_loss_steps": 2,
            "evaluation_period": 4,
        },
        "checkpoint": {"checkpoints_dir": tmp_path / "checkpoints", "checkpoint_period": 1},
    }
    runner, recorder = start(tmp_path, diary, **changes)
    runner.run(loader(data(16)), loader(TEST))
    runner.watchers.close()
    assert diary.events == [
        ("start", 0, 4, 8),
        ("batch", 8), ("batch", 8), ("update", 1), ("step", 2), ("epoch", 0, 2), ("checkpoint", 2),
        ("batch", 8), ("batch", 8), ("update", 2), ("step", 4), ("epoch", 1, 4), ("evaluation", 4), ("checkpoint", 4),
        ("end", 4, None), ("close",),
    ]  # fmt: skip
    assert [report.loss for report in diary.updates] == recorder.losses
    assert [report.gradient_norm for report in diary.updates] == [report.gradient_norm for report in recorder.steps]


class On(Callback):
    """Does something with the control after the given update."""

    def __init__(self, update: int, *calls: tuple[Any, ...]) -> None:
        self.update, self.calls = update, calls

    def on_update(self, report: UpdateReport) -> None:
        if report.update == self.update:
            for name, *arguments in self.calls:
                getattr(self.control, name)(*arguments)


def test_stop_ends_the_round_as_if_it_had_no_further_steps(tmp_path: Path) -> None:
    shorter, _ = start(tmp_path, training={"num_train_steps": 3})
    shorter.run(loader())
    checkpoint = {"checkpoints_dir": tmp_path / "checkpoints"}
    runner, recorder = start(tmp_path, On(3, ("stop", "good enough")), checkpoint=checkpoint)
    summary = runner.run(loader(), loader(TEST))
    assert (summary.steps, summary.stopped, runner.round) == (3, "good enough", 1)
    assert_same_bits(weights_of(runner), weights_of(shorter))
    assert recorder.summaries == [summary]
    report = runner.end_training(loader(TEST))
    assert report is not None
    assert (report.step, report.round, report.update) == (3, 0, 3)


@pytest.mark.parametrize(("steps", "trained"), [(8, 0), (10, 7)])
def test_a_stopped_round_stays_over_unless_more_steps_are_asked_for(tmp_path: Path, steps: int, trained: int) -> None:
    checkpoint = {"checkpoints_dir": tmp_path / "checkpoints"}
    first, _ = start(tmp_path, On(3, ("stop", "enough")), checkpoint=checkpoint)
    first.run(loader())
    first.end_training()
    runner, _ = start(tmp_path, checkpoint=checkpoint, training={"num_train_steps": steps})
    assert runner.round == (1 if trained == 0 else 0)
    if trained:
        assert runner.run(loader()).steps == trained


def test_the_learning_rate_is_set_scaled_and_given_back(tmp_path: Path) -> None:
    """The rates that updates report, and weights equal to those of plain gradient descent at these rates."""
    diary = Diary()
    changes = [
        On(1, ("scale_learning_rate", 0.5)),
        On(2, ("scale_learning_rate", 0.5)),
        On(3, ("set_learning_rate", 0.2)),
        On(5, ("set_learning_rate", None), ("scale_learning_rate", 4.0)),
    ]
    runner, _ = start(tmp_path, diary, *changes)
    before = weights_of(runner)
    runner.run(loader())
    expected = [0.1, 0.05, 0.025, 0.05, 0.05, 0.1, 0.1, 0.1]
    assert [report.learning_rate for report in diary.updates] == pytest.approx(expected, rel=1e-12)

    tensors = {name: tensor.clone().requires_grad_() for name, tensor in before.items()}
    for update, rate in enumerate(expected):
        rows = slice(4 * update, 4 * update + 4)
        hidden = torch.relu(torch.from_numpy(TRAIN["x"][rows]) @ tensors["w1"] + tensors["b1"])
        logits = hidden @ tensors["w2"] + tensors["b2"]
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(TRAIN["label"][rows]))
        gradients = torch.autograd.grad(loss, list(tensors.values()))
        with torch.no_grad():
            for tensor, gradient in zip(tensors.values(), gradients, strict=True):
                tensor -= rate * gradient
    for name, tensor in weights_of(runner).items():
        torch.testing.assert_close(tensor, tensors[name].detach(), rtol=1e-5, atol=1e-6)


def test_the_next_round_begins_at_its_own_rate(tmp_path: Path) -> None:
    diary = Diary()
    runner, _ = start(tmp_path, diary, On(2, ("scale_learning_rate", 0.0)))
    runner.run(loader())
    runner.run(loader())
    assert [report.learning_rate for report in diary.updates] == [0.1, 0.1, *[0.0] * 6, *[0.1] * 8]


def test_evaluate_and_save_now(tmp_path: Path) -> None:
    diary = Diary()
    checkpoint = {"checkpoints_dir": tmp_path / "checkpoints", "max_num_checkpoints": 9}
    runner, _ = start(tmp_path, diary, On(2, ("evaluate_now",)), On(5, ("save_now",)), checkpoint=checkpoint)
    summary = runner.run(loader(), loader(TEST))
    assert [event for event in diary.events if event[0] in ("evaluation", "checkpoint")] == [
        ("evaluation", 2), ("checkpoint", 5), ("checkpoint", 8),
    ]  # fmt: skip
    assert set(summary.metrics) == {"loss", "accuracy"}
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()) == [
        "checkpoint-00000005", "checkpoint-00000008",
    ]  # fmt: skip


class StopsWhenEvaluated(Callback):
    def on_evaluation(self, report: EvaluationReport) -> None:
        self.control.stop(f"loss {report.metrics['loss']:.1f}")


def test_what_an_evaluation_asks_for_is_done_at_once(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, On(2, ("evaluate_now",)), StopsWhenEvaluated())
    summary = runner.run(loader(), loader(TEST))
    assert summary.steps == 2
    assert summary.stopped == f"loss {summary.metrics['loss']:.1f}"


class Skips(Callback):
    """Leaves out batches by their first label."""

    def __init__(self, *labels: int) -> None:
        self.labels = labels

    def on_batch(self, batch: Batch) -> None:
        if int(batch.features["label"][0]) in self.labels:
            self.control.skip_step()


def test_a_skipped_batch_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    features = data(48)
    runner, recorder = start(tmp_path, Skips(0))
    runner.run(loader(features))
    kept = np.concatenate([range(i, i + 4) for i in range(0, 48, 4) if features["label"][i] != 0])
    assert 32 <= len(kept) < 48  # enough, and not all
    plain, expected = start(tmp_path)
    plain.run(loader({name: array[kept] for name, array in features.items()}))
    assert_same_bits(weights_of(runner), weights_of(plain))
    assert recorder.losses == expected.losses
    assert runner.state.counters.update == 8


def test_skipping_everything_is_an_error_not_a_hang(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, Skips(0, 1, 2, 3))
    with pytest.raises(DataError, match=r"callbacks skipped 17 batches in a row, more than an epoch.*Check"):
        runner.run(loader())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("skip_step",), r"skip_step\(\) belongs in on_batch\(batch\).*call skip_step\(\) in on_batch"),
        (("evaluate_now",), r"evaluate_now\(\) needs test data: pass test_data_loader to run\(\), or validation_data"),
        (("save_now",), r"save_now\(\) needs checkpoint.checkpoints_dir; set it to"),
        (("set_learning_rate", -1.0), r"set_learning_rate\(-1.0\): expected a number from 0, or None"),
        (("set_learning_rate", float("nan")), r"set_learning_rate\(nan\): expected a number from 0"),
        (("scale_learning_rate", float("inf")), r"scale_learning_rate\(inf\): expected a number from 0"),
    ],
)
def test_what_cannot_be_asked_for(tmp_path: Path, call: tuple[Any, ...], words: str) -> None:
    runner, _ = start(tmp_path, On(1, call))
    with pytest.raises(ParametersError, match=words):
        runner.run(loader())


class Fails(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, *_: Any) -> None:
        raise KeyError("no such thing")


class FailsQuietly(Fails):
    stop_on_error = False


HOOKS = ("on_run_start", "on_update", "on_step", "on_epoch_end", "on_evaluation", "on_checkpoint", "on_end")


def run_with(folder: Path, callback: Callback) -> tuple[TrainingRunner, Diary]:
    diary = Diary()
    changes: dict[str, Any] = {
        "training": {"evaluation_period": 2},
        "checkpoint": {"checkpoints_dir": folder / "checkpoints", "checkpoint_period": 2},
    }
    runner, _ = start(folder, callback, diary, **changes)
    return runner, diary


@pytest.mark.parametrize("hook", HOOKS)
def test_an_exception_in_a_callback_ends_the_run(tmp_path: Path, hook: str) -> None:
    runner, diary = run_with(tmp_path, Fails(hook))
    with pytest.raises(KeyError, match="no such thing") as caught:
        runner.run(loader(), loader(TEST))
    assert "Raised in the callback Fails; it ends the run. Set stop_on_error = False" in caught.value.__notes__[0]
    assert diary.events[-1] == ("exception", "KeyError")
    if hook in ("on_update", "on_step"):
        assert "The steps before, to step 1, are saved as" in caught.value.__notes__[1]


@pytest.mark.parametrize("hook", HOOKS)
def test_told_otherwise_the_run_continues_without_the_callback(tmp_path: Path, hook: str) -> None:
    runner, diary = run_with(tmp_path, FailsQuietly(hook))
    assert runner.run(loader(), loader(TEST)).steps == 8
    runner.watchers.close()
    runner.watchers.raise_failures()
    assert diary.events[-2:] == [("end", 8, None), ("close",)]


def test_an_error_is_passed_on_to_callbacks_and_stays_what_it_is(tmp_path: Path) -> None:
    diary = Diary()
    runner, _ = start(tmp_path, Fails("on_exception"), diary)
    with pytest.raises(DataError, match="the data have no feature 'label'") as caught:
        runner.run(loader({"x": TRAIN["x"]}))
    assert diary.events[-1] == ("exception", "DataError")
    assert any("Fails.on_exception failed too: KeyError" in note for note in caught.value.__notes__)


class HalvesEveryThird(Callback):
    """Counts displayed losses by itself: the count must survive a resume."""

    def __init__(self) -> None:
        self.seen = 0

    def on_step(self, report: StepReport) -> None:
        self.seen += 1
        if self.seen % 3 == 0:
            self.control.scale_learning_rate(0.5)

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("killed_at", [3, 4, 5])
def test_a_resumed_run_steers_as_one_that_was_never_killed(tmp_path: Path, killed_at: int) -> None:
    def run(name: str, *others: Callback) -> tuple[TrainingRunner, Diary]:
        diary = Diary()
        checkpoint = {"checkpoints_dir": tmp_path / name, "checkpoint_period": 1, "max_num_checkpoints": 2}
        runner, _ = start(tmp_path, HalvesEveryThird(), diary, *others, checkpoint=checkpoint, optimizer=ADAM)
        return runner, diary

    class Power(Exception):
        """Cut."""

    class Cut(Callback):
        def on_checkpoint(self, report: Any) -> None:
            if report.update == killed_at:
                raise Power

    whole, expected = run("whole")
    whole.run(loader())
    killed, _ = run("killed", Cut())
    with pytest.raises(Power):
        killed.run(loader())
    killed.wait_for_checkpoint()
    resumed, diary = run("killed")
    resumed.run(loader())
    assert [report.learning_rate for report in diary.updates] == [
        report.learning_rate for report in expected.updates[killed_at:]
    ]
    assert_same_bits(state_bits(resumed), state_bits(whole))


class KeepsATensor(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"best": torch.zeros(2)}


def test_a_state_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, KeepsATensor(), checkpoint={"checkpoints_dir": tmp_path / "checkpoints"})
    words = r"KeepsATensor.state_dict\(\) returned what JSON cannot hold: .*convert tensors with .item\(\) or .tolist"
    with pytest.raises(ParametersError, match=words):
        runner.run(loader())


def test_states_go_to_callbacks_of_their_class_in_order_also_to_late_ones(tmp_path: Path) -> None:
    checkpoint = {"checkpoints_dir": tmp_path / "checkpoints"}
    first, second = HalvesEveryThird(), HalvesEveryThird()
    runner, _ = start(tmp_path, first, second, checkpoint=checkpoint)
    second.seen = 100
    runner.run(loader())
    runner.end_training()
    latest = find_latest(tmp_path / "checkpoints")
    assert latest is not None
    assert read_record(latest)["callbacks"] == {"HalvesEveryThird": {"seen": 8}, "HalvesEveryThird 2": {"seen": 108}}
    now, late = HalvesEveryThird(), HalvesEveryThird()
    resumed, _ = start(tmp_path, now, checkpoint=checkpoint)
    assert (now.seen, late.seen) == (8, 0)
    resumed.watchers.add([late])
    assert late.seen == 108


# ------------------------------------------------------------------------------------------------------- many ranks


def steered_on_ranks(folder: Path) -> tuple[list[float], list[int], int, str | None, int, float]:
    """Only rank 0 has the callbacks that steer; rank 1 skips, and asks in vain to stop."""
    mesh = start_mesh(Distributed(data_parallel_size=2), "cpu")
    diary = Diary()
    steering = [On(1, ("scale_learning_rate", 0.5)), On(3, ("evaluate_now",)), On(6, ("stop", "enough"))]
    own: list[Callback] = steering if mesh.rank == 0 else [On(2, ("stop", "not mine to say")), Skips(3)]
    distributed = {"data_parallel_size": 2}
    asked = parameters(folder, training={"num_train_steps": 12}, distributed=distributed)
    runner = TrainingRunner(asked, ON_ONE_THREAD, [diary, *own], mesh)
    runner.initialize()
    features = {name: array[mesh.rank :: 2] for name, array in data(96).items()}
    summary = runner.run(loader(features), loader(TEST))
    rates = [report.learning_rate for report in diary.updates]
    evaluated = [event[1] for event in diary.events if event[0] == "evaluation"]
    batches = sum(event[0] == "batch" for event in diary.events)
    weight = float(runner.net.weights["w1"].double().sum())
    return rates, evaluated, summary.steps, summary.stopped, batches, weight


def test_ranks_agree_on_what_rank_0_asks_for_and_any_rank_may_skip(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    first, second = run_on_ranks(2, steered_on_ranks, tmp_path)
    # Heard one update later than it was asked for.
    assert first[:4] == ([0.1, 0.1, *[0.05] * 5], [4], 7, "enough")
    assert second[:4] == ([0.1, 0.1, *[0.05] * 5], [4], 7, "a callback of rank 0")
    labels = data(96)["label"][1::2][::4]
    read = next(count for count in range(len(labels) + 1) if sum(labels[:count] != 3) == 7)
    assert read > 7  # something was skipped
    assert first[4] == second[4] == read
    assert first[5] == second[5]


def killed_on_ranks(folder: Path, name: str, stop_at: int | None) -> tuple[list[float], float]:
    mesh = start_mesh(Distributed(data_parallel_size=2), "cpu")
    diary = Diary()
    checkpoint = {"checkpoints_dir": folder / name, "checkpoint_period": 1, "max_num_checkpoints": 2}
    distributed = {"data_parallel_size": 2}
    asked = parameters(folder, distributed=distributed, checkpoint=checkpoint, optimizer=ADAM)
    runner = TrainingRunner(asked, ON_ONE_THREAD, [HalvesEveryThird(), diary], mesh)
    runner.initialize()
    features = {name: array[mesh.rank :: 2] for name, array in data(64).items()}
    if stop_at is None:
        runner.run(loader(features))
    else:
        steps = TrainingRound._steps
        TrainingRound._steps = lambda *given: itertools.islice(steps(*given), stop_at)  # type: ignore[method-assign]
        runner.run(loader(features))
    runner.wait_for_checkpoint()
    return [report.learning_rate for report in diary.updates], float(runner.net.weights["w1"].double().sum())


@pytest.mark.parametrize("stop_at", [3, 4])
def test_what_was_asked_for_on_ranks_is_in_the_checkpoint(tmp_path: Path, stop_at: int) -> None:
    """A checkpoint waits for what still travels: else the rate would not be halved in the resumed run."""
    save_mlp(tmp_path)
    (expected, weight), other = run_on_ranks(2, killed_on_ranks, tmp_path, "whole", None)
    assert (expected, weight) == other
    assert expected == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025]
    run_on_ranks(2, killed_on_ranks, tmp_path, "killed", stop_at)
    resumed = run_on_ranks(2, killed_on_ranks, tmp_path, "killed", None)
    assert resumed == [(expected[stop_at:], weight)] * 2

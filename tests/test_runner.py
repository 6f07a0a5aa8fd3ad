"""A run of one round: its order, its step modes, what it evaluates and reports and when, what it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import write_loss_model
from onward.engine.reports import CheckpointReport, EvaluationReport, StepReport
from onward.errors import DataError, OnwardError, ParametersError
from onward.graph.writing import model_saving
from onward.runner import TrainingRunner
from tests.mlp import (
    CROSS_ENTROPY,
    ON_ONE_THREAD,
    SQUARES,
    assert_same_bits,
    batches_of,
    build_mlp,
    cross_entropies,
    data,
    forward,
    parameters,
    save_mlp,
    start,
    weights,
    weights_of,
)
from tests.watching import Recorder

TRAIN = data(32)
TEST = data(11, seed=1)


def loader(features: dict[str, np.ndarray] = TRAIN, **options: Any) -> InMemoryDataLoader:
    return InMemoryDataLoader(features, **options)


# ------------------------------------------------------------------------------------------------------------- order


def test_initialize_run_end_training(tmp_path: Path) -> None:
    """The order of the seeds, to the trained model that onnxruntime runs as training left it."""
    runner, recorder = start(tmp_path, paths={"output_dir": tmp_path / "out"})
    before = weights_of(runner)
    summary = runner.run(loader(), loader(TEST), mapped_dimensions={"batch": 4})
    report = runner.end_training(loader(TEST))
    after = weights_of(runner)
    assert summary == recorder.summaries[0]
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert report is not None
    expected = cross_entropies(forward(TEST["x"], after), TEST["label"]).mean()
    assert report.metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert recorder.evaluations == [report]
    path = tmp_path / "out" / "mlp_trained.onnx"
    assert recorder.messages == [f"trained model written to {path}."]
    session = onnxruntime.InferenceSession(path)
    np.testing.assert_allclose(session.run(None, {"x": TEST["x"]})[0], forward(TEST["x"], after), atol=1e-5)


def test_the_file_of_the_weights_is_named_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out" / "mlp_trained.onnx"
    model = build_mlp()
    model.graph.initializer.append(numpy_helper.from_array(np.ones(1000, np.float32), "unused"))
    onnx.save(model, tmp_path / "mlp.onnx")
    for largest, files in ((100, f"{path}, {path}.data"), (10**9, f"{path}")):  # the second leaves the first one's data
        monkeypatch.setattr(model_saving, "EXTERNAL_ABOVE_BYTES", largest)
        runner, recorder = start(tmp_path, paths={"output_dir": tmp_path / "out"})
        runner.run(loader())
        runner.end_training()
        assert recorder.messages == [f"trained model written to {files}."]


def test_out_of_order(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    runner = TrainingRunner(parameters(tmp_path), ON_ONE_THREAD)
    message = r"^TrainingRunner is not initialized; call initialize\(\) first\.$"
    for call in (
        lambda: runner.run(loader()),
        lambda: runner.evaluate(loader()),
        lambda: runner.end_training(),
        lambda: runner.save_checkpoint(),
        lambda: runner.reset_loss_scale(),
        lambda: runner.round,
        lambda: runner.net,
    ):
        with pytest.raises(OnwardError, match=message):
            call()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    runner, _ = start(tmp_path)
    with pytest.raises(DataError, match=r"^run\(\) needs a training data loader; to evaluate alone, call end_training"):
        runner.run(None)  # type: ignore[arg-type]
    with pytest.raises(
        ParametersError, match=r"^checkpoint\.checkpoints_dir is not set; set it to the folder for checkpoints\.$"
    ):
        runner.save_checkpoint()
    with pytest.raises(ParametersError, match=r"^paths\.output_dir is not set; there is no trained model\.$"):
        _ = runner.trained_model_path


def test_without_a_test_loader_nothing_is_evaluated(tmp_path: Path) -> None:
    runner, recorder = start(tmp_path, training={"evaluation_period": 2})
    assert runner.run(loader()).metrics == {}
    assert runner.end_training() is None
    assert recorder.evaluations == []
    assert not list(tmp_path.glob("**/*trained*"))


def test_skip_evaluation(tmp_path: Path) -> None:
    runner, recorder = start(tmp_path, training={"evaluation_period": 2, "skip_evaluation": True})
    runner.run(loader(), loader(TEST))
    assert runner.end_training(loader(TEST)) is None
    assert recorder.evaluations == []


# -------------------------------------------------------------------------------------------------------- step modes


def torch_updates(batches: list[list[dict[str, np.ndarray]]], rate: float) -> dict[str, torch.Tensor]:
    """Weights after plain gradient descent, one update for each list of micro-batches, in float64 torch."""
    w = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in weights().items()}
    for micro_batches in batches:
        total = torch.zeros((), dtype=torch.float64)
        for batch in micro_batches:
            x = torch.from_numpy(batch["x"]).double()
            logits = torch.relu(x @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]
            total = total + torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch["label"]))
        gradients = torch.autograd.grad(total / len(micro_batches), list(w.values()))
        with torch.no_grad():
            for tensor, gradient in zip(w.values(), gradients, strict=True):
                tensor -= rate * gradient
    return {name: tensor.detach() for name, tensor in w.items()}


class Weights:
    """A training set that copies the weights before each batch is asked for."""

    def __init__(self, runner: TrainingRunner) -> None:
        self.runner = runner
        self.seen: list[dict[str, torch.Tensor]] = []
        self.source = loader()
        self.feature_specs = self.source.feature_specs

    def batches(self, batch_size: int, *cursor: Any) -> Any:
        for batch in self.source.batches(batch_size, *cursor):
            self.seen.append(weights_of(self.runner))
            yield batch


def test_accumulate_steps_leave_the_weights_and_update_steps_take_the_mean_gradient(tmp_path: Path) -> None:
    """K = 4: the weights move at every fourth step, by the mean gradient of four micro-batches (torch, float64)."""
    runner, _ = start(tmp_path, training={"gradient_accumulation_steps": 4, "batch_size": 2})
    source = Weights(runner)
    runner.run(source)  # type: ignore[arg-type]
    seen = [*source.seen, weights_of(runner)]
    for step in range(1, 9):
        moved = any(not torch.equal(seen[step][name], seen[step - 1][name]) for name in seen[0])
        assert moved == (step % 4 == 0), step
    micro = list(batches_of(TRAIN, 2))
    expected = torch_updates([micro[:4], micro[4:8]], rate=0.1)
    for name, tensor in expected.items():
        torch.testing.assert_close(seen[-1][name].double(), tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [CROSS_ENTROPY, SQUARES], ids=["cross entropy", "squares"])
def test_accumulation_equals_a_larger_batch(tmp_path: Path, loss: dict[str, Any]) -> None:
    """K micro-batches of B are one of K * B, in losses and weights, to 1e-6, for losses that are means."""
    optimizer = {"training_optimizer_name": "AdamW", "max_norm_clip": 1.0}
    rate = {"initial_lr": 0.01}
    small, few = start(
        tmp_path,
        loss=loss,
        optimizer=optimizer,
        learning_rate=rate,
        training={"batch_size": 2, "num_train_steps": 16, "gradient_accumulation_steps": 4},
    )
    large, many = start(
        tmp_path, loss=loss, optimizer=optimizer, learning_rate=rate, training={"batch_size": 8, "num_train_steps": 4}
    )
    small.run(loader())
    large.run(loader())
    np.testing.assert_allclose(few.losses, many.losses, rtol=1e-6)
    for one, other in zip(few.steps, many.steps, strict=True):
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-6)
    for name, tensor in weights_of(large).items():
        torch.testing.assert_close(weights_of(small)[name], tensor, rtol=1e-6, atol=1e-6)


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    """Dropout and running statistics included: with evaluations between the steps, the bits are the same."""
    results = []
    for period in (0, 1):
        save_mlp(tmp_path, dropout=0.3, normalized=True)
        runner, _ = start(tmp_path, training={"evaluation_period": period})
        runner.run(loader(), loader(TEST))
        results.append(weights_of(runner))
    assert_same_bits(*results)


# ---------------------------------------------------------------------------------------- when, and in which unit


def test_periods_count_steps_or_updates(tmp_path: Path) -> None:
    """12 steps, an update every 2: evaluation counts steps; display and checkpoints count updates."""

    class Order(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.events: list[tuple[str, int, int]] = []

        def on_step(self, report: StepReport) -> None:
            self.events.append(("step", report.step, report.update))

        def on_evaluation(self, report: EvaluationReport) -> None:
            self.events.append(("evaluation", report.step, report.update))

        def on_checkpoint(self, report: CheckpointReport) -> None:
            self.events.append(("checkpoint", report.step, report.update))

    order = Order()
    runner, _ = start(
        tmp_path,
        order,
        training={
            "num_train_steps": 12,
            "gradient_accumulation_steps": 2,
            "display_loss_steps": 4,
            "evaluation_period": 3,
        },
        checkpoint={"checkpoints_dir": tmp_path / "c", "checkpoint_period": 2, "max_num_checkpoints": 2},
    )
    summary = runner.run(loader(), loader(TEST))
    assert order.events == [
        ("step", 2, 1),
        ("evaluation", 3, 1),
        ("checkpoint", 4, 2),
        ("evaluation", 6, 3),
        ("step", 8, 4),
        ("checkpoint", 8, 4),
        ("evaluation", 9, 4),
        ("step", 12, 6),
        ("evaluation", 12, 6),
        ("checkpoint", 12, 6),
    ]
    names = ["checkpoint-00000004", "checkpoint-00000006"]
    assert sorted(path.name for path in (tmp_path / "c").glob("checkpoint-*")) == names
    assert summary.checkpoint == str(tmp_path / "c" / names[1])


def test_the_loss_shown_is_the_mean_since_the_last_report(tmp_path: Path) -> None:
    """With a learning rate of 0 every loss is known: numpy's, over the batches of each window."""
    runner, recorder = start(
        tmp_path,
        learning_rate={"initial_lr": 0.0},
        training={"display_loss_steps": 2, "gradient_accumulation_steps": 2, "num_train_steps": 12, "batch_size": 2},
    )
    runner.run(loader())
    losses = [cross_entropies(forward(b["x"], weights()), b["label"]).mean() for b in list(batches_of(TRAIN, 2))[:12]]
    windows = [losses[0:2], losses[2:4], losses[4:8], losses[8:12]]
    assert [report.update for report in recorder.steps] == [1, 2, 4, 6]
    np.testing.assert_allclose(recorder.losses, [np.mean(window) for window in windows], rtol=1e-6)


def test_reports_add_up(tmp_path: Path) -> None:
    runner, recorder = start(
        tmp_path, training={"batch_size": 5, "num_train_steps": 9, "gradient_accumulation_steps": 3}
    )
    summary = runner.run(loader(), loader(TEST))
    assert [(r.step, r.update, r.samples, r.epoch) for r in recorder.steps] == [
        (3, 1, 15, 0),
        (6, 2, 30, 0),
        (9, 3, 45, 1),
    ]
    assert {(r.round, r.num_train_steps, r.loss_scale, r.skipped_updates) for r in recorder.steps} == {(0, 9, None, 0)}
    assert (summary.round, summary.steps, summary.updates, summary.skipped_updates) == (0, 9, 3, 0)
    assert (summary.samples, summary.batch_size, summary.gradient_accumulation_steps) == (45, 5, 3)
    assert (summary.first_loss, summary.last_loss) == (recorder.losses[0], recorder.losses[-1])
    assert 0 < summary.train_seconds <= summary.seconds
    assert summary.samples_per_second == pytest.approx(45 / summary.train_seconds)
    assert summary.stable_samples_per_second > 0
    assert summary.checkpoint is None
    assert all(r.samples_per_second > 0 and r.data_wait_seconds >= 0 for r in recorder.steps)
    assert recorder.steps[-1].seconds_left == 0
    assert recorder.steps[0].seconds_left > 0


def test_the_summary_holds_the_metrics_of_the_last_evaluation(tmp_path: Path) -> None:
    runner, recorder = start(tmp_path, training={"evaluation_period": 4})
    summary = runner.run(loader(), loader(TEST))
    assert [r.step for r in recorder.evaluations] == [4, 8]
    assert summary.metrics == recorder.evaluations[-1].metrics
    test = loader(TEST)
    runner.end_training(test)
    assert len(recorder.evaluations) == 3
    runner.end_training(test)
    assert len(recorder.evaluations) == 3, "the same weights on the same data need no second evaluation"


def test_the_profiler_covers_the_steps_asked_for_and_changes_no_number(tmp_path: Path) -> None:
    """A table and a trace of steps 3 to 5, in the output folder; a range that ends with the round ends with it."""
    plain, _ = start(tmp_path)
    plain.run(loader())
    for first, last in ((3, 5), (7, 99)):
        profiler = {"first_step": first, "last_step": last, "top_nodes": 2}
        runner, recorder = start(tmp_path, paths={"output_dir": tmp_path / f"out{first}"}, profiler=profiler)
        runner.run(loader())
        assert_same_bits(weights_of(runner), weights_of(plain))
        (table,) = recorder.messages
        done = f"steps-{first}-{min(last, 8)}"
        assert table.startswith(f"profile of steps {first} to {min(last, 8)}: ")
        names = {path.name.removeprefix(done) for path in (tmp_path / f"out{first}" / "profile").iterdir()}
        assert names == {".pt.trace.json", ".nodes.csv"}


def test_rank_0_alone_writes_the_model_with_its_loss(tmp_path: Path) -> None:
    """Ranks that share a folder took the unfinished file from each other."""
    save_mlp(tmp_path)
    asked = parameters(
        tmp_path, paths={"model_path": tmp_path / "mlp.onnx", "model_with_loss_func_path": tmp_path / "loss.onnx"}
    )
    write_loss_model(asked, 1)
    assert not (tmp_path / "loss.onnx").exists()
    write_loss_model(asked, 0)
    assert (tmp_path / "loss.onnx").exists()


# ------------------------------------------------------------------------------------------- what Python programs hold


def test_run_takes_data_of_any_kind(tmp_path: Path) -> None:
    """Arrays, a tuple and a torch DataLoader train like the loader over the same samples."""
    expected, losses = start(tmp_path)
    expected.run(loader(), loader(TEST))
    tensors = (torch.from_numpy(TRAIN["x"]), torch.from_numpy(TRAIN["label"]))
    kinds: list[Any] = [
        TRAIN,
        (TRAIN["x"], TRAIN["label"]),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors), batch_size=4),
    ]
    for given in kinds:
        runner, recorder = start(tmp_path)
        runner.run(given, TEST)
        assert recorder.losses == losses.losses
        assert_same_bits(weights_of(runner), weights_of(expected))
        report = runner.end_training(TEST)
        assert report is not None
        assert report.metrics == expected.evaluate(loader(TEST)).metrics
        assert len(recorder.evaluations) == 1  # data that were evaluated after the last update are not again


def test_what_is_no_data_is_refused(tmp_path: Path) -> None:
    runner, _ = start(tmp_path)
    with pytest.raises(DataError, match=r"data of type int are not supported; pass a dictionary of arrays"):
        runner.run(3)
    assert runner.run(loader()).steps == 8


def test_the_files_of_the_log_folder_are_written(tmp_path: Path) -> None:
    """`tensorboard.log_dir` counts in Python as on the command line, messages of the start included."""
    runner, _ = start(tmp_path, tensorboard={"log_dir": tmp_path / "log"}, optimizer={"optimizer_attributes": [
        {"weights": "nothing", "learning_rate_factor": 1.0}]})  # fmt: skip
    runner.run(loader(), loader(TEST))
    runner.end_training(loader(TEST))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("step") == 8
    assert kinds.count("evaluation") == 1
    assert kinds[0] == "message"
    assert len(list((tmp_path / "log").glob("events.out.tfevents.*"))) == 1


def test_progress_is_shown_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_mlp(tmp_path)
    for progress in (True, False):
        runner = TrainingRunner(parameters(tmp_path), ON_ONE_THREAD, progress=progress)
        runner.initialize()
        runner.run(loader())
        runner.end_training()
        assert capsys.readouterr().out.count("train  step 8/8") == progress

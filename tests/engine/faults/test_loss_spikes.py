"""A spike of the loss: the run returns to its last checkpoint and leaves out the data of that update."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.callbacks import Callback
from onward.engine.faults.loss_spikes import LossSpikes, _deviations
from onward.engine.loop import StepDone
from onward.engine.reports import RollBackReport, UpdateReport
from onward.errors import ParametersError
from onward.parameters import OnBadLoss
from onward.report.metrics_file import MetricsFile
from onward.report.page.page import render_page
from onward.report.page.run_record import read_run
from onward.report.run_record import RunRecord, resolved_yaml
from tests.mlp import SQUARES, assert_same_bits, data, parameters, save_mlp, start, weights_of
from tests.ranks import run_on_ranks

STEPS, BAD = 40, 27
RUN: dict[str, Any] = {
    "loss": SQUARES,
    "learning_rate": {"initial_lr": 0.01},
    "optimizer": {"training_optimizer_name": "AdamW"},
    "training": {"num_train_steps": STEPS, "display_loss_steps": 50},
}


def test_without_a_threshold_no_batch_is_kept(tmp_path: Path) -> None:
    runner, _ = start(tmp_path)
    spikes = LossSpikes(runner.state, OnBadLoss())
    kept = {name: copy.copy(value) for name, value in vars(spikes).items() if isinstance(value, list)}
    for step in range(1, 9):
        spikes.after_step(StepDone(step=step, update=None, report=None, origin=(("memory", range(4)),)), lambda: False)
    assert (
        kept
        == {name: value for name, value in vars(spikes).items() if isinstance(value, list)}
        == {"_micro_batches": []}
    )


def samples(seed: int = 0, bad: tuple[int, ...] = (BAD,)) -> dict[str, np.ndarray]:
    """200 samples, 50 batches of 4; those of the given batches have targets far away."""
    features = data(200, seed)
    for number in bad:
        features["target"][4 * number : 4 * number + 4] += 1000
    return features


def without(features: dict[str, np.ndarray], batch: int) -> dict[str, np.ndarray]:
    return {name: np.delete(array, range(4 * batch, 4 * batch + 4), axis=0) for name, array in features.items()}


def watching(folder: Path, **changes: Any) -> dict[str, Any]:
    spikes = {"spike_threshold": 20, "spike_window": 32, **changes}
    return {
        **RUN,
        "on_bad_loss": spikes,
        "checkpoint": {"checkpoints_dir": folder / "c", "checkpoint_period": 5, "blocking": True},
    }


def test_the_bad_batch_leaves_no_trace(tmp_path: Path) -> None:
    """Bit-equal to a run on data without it."""
    runner, recorder = start(tmp_path, **watching(tmp_path))
    runner.run(InMemoryDataLoader(samples()))
    told = [text for text in recorder.messages if "robust standard deviations" in text]
    assert len(told) == 1
    assert told[0].startswith(f"update {BAD + 1}: its ")
    assert f"(data in memory: samples {4 * BAD}, {4 * BAD + 1}, {4 * BAD + 2}, {4 * BAD + 3})" in told[0]
    assert told[0].endswith(f"; returned to {tmp_path}/c/checkpoint-00000025, and these data are left out.")
    assert (runner.state.course.rollbacks, runner.state.counters.update) == (1, STEPS)
    clean, _ = start(tmp_path, **RUN)
    clean.run(InMemoryDataLoader(without(samples(), BAD)))
    assert_same_bits(weights_of(runner), weights_of(clean))


class Returns(Callback):
    """Keeps the events."""

    def __init__(self) -> None:
        self.reports: list[RollBackReport] = []

    def on_roll_back(self, report: RollBackReport) -> None:
        self.reports.append(report)


def test_it_is_an_event_of_the_log_the_record_and_the_report(tmp_path: Path) -> None:
    changes = watching(tmp_path) | {"training": {"num_train_steps": STEPS, "display_loss_steps": 1}}
    logs, returns = tmp_path / "logs", Returns()
    record = RunRecord(logs, resolved_yaml(parameters(tmp_path, **changes)), {}, resumed_update=None)
    runner, _ = start(tmp_path, returns, MetricsFile(logs / "metrics.jsonl"), record, **changes)
    runner.run(InMemoryDataLoader(samples()))
    runner.watchers.close()
    (report,) = returns.reports
    assert (report.update, report.returned_to, report.path) == (BAD + 1, 25, str(tmp_path / "c/checkpoint-00000025"))
    assert report.cause in ("loss", "gradient norm")
    assert report.deviations > 20
    expected = dataclasses.asdict(report)
    assert expected["samples"] == f"data in memory: samples {4 * BAD}, {4 * BAD + 1}, {4 * BAD + 2}, {4 * BAD + 3}"
    events = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    (event,) = [one for one in events if one["kind"] == "roll_back"]
    assert {name: event[name] for name in expected} == expected
    assert json.loads((logs / "run.json").read_text())["rollbacks"] == [expected]
    page_record = read_run(logs, "run")
    assert [update for update, _ in page_record.curves["loss"]] == list(range(1, STEPS + 1)), "each update once"
    page = render_page([page_record], {})
    assert '<h2 id="roll-backs">Roll-backs</h2>' in page
    assert f"<td>{expected['samples']}</td>" in page
    assert "Roll-backs" not in render_page([dataclasses.replace(page_record, rollbacks=())], {})


def test_a_resumed_run_that_meets_the_same_spike_reports_it_once(tmp_path: Path) -> None:
    """The checkpoint from which it resumes is from before the spike."""
    logs = tmp_path / "logs"
    for stop in (26, None):
        asked = watching(tmp_path)
        is_resumed = stop is None
        record = RunRecord(logs, resolved_yaml(parameters(tmp_path, **asked)), {}, 25 if is_resumed else None)
        metrics = MetricsFile(logs / "metrics.jsonl", 25 if is_resumed else None)
        runner, _ = start(tmp_path, metrics, record, *([] if stop is None else [Stops(stop)]), **asked)
        with contextlib.suppress(KeyboardInterrupt):
            runner.run(InMemoryDataLoader(samples()))
        runner.watchers.close()
    assert [one["update"] for one in json.loads((logs / "run.json").read_text())["rollbacks"]] == [BAD + 1]
    assert [one["update"] for one in read_run(logs, "run").rollbacks] == [BAD + 1]


class Stops(Callback):
    """Fails at an update, the first time after the spike that it comes there."""

    def __init__(self, update: int) -> None:
        self.update = update
        self.seen = 0

    def on_update(self, report: UpdateReport) -> None:
        self.seen = max(self.seen, report.update)
        if self.seen > BAD and report.update == self.update:
            raise KeyboardInterrupt


@pytest.mark.parametrize("update", [26, 27, 30, 31])
def test_a_run_that_ends_after_a_spike_resumes_to_the_same_bits(tmp_path: Path, update: int) -> None:
    """Before the bad batch is passed again, from a checkpoint that does not know of it, and after."""
    whole, _ = start(tmp_path, **watching(tmp_path / "whole"))
    whole.run(InMemoryDataLoader(samples()))
    runner, _ = start(tmp_path, Stops(update), **watching(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        runner.run(InMemoryDataLoader(samples()))
    resumed, _ = start(tmp_path, **watching(tmp_path))
    assert 0 < resumed.state.counters.update <= update
    resumed.run(InMemoryDataLoader(samples()))
    assert_same_bits(weights_of(resumed), weights_of(whole))
    assert resumed.state.course == whole.state.course


def test_too_many_spikes_end_the_run(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, **watching(tmp_path, max_rollbacks=1))
    with pytest.raises(ParametersError, match=r"max_rollbacks allows 1 of them\. Look at these samples") as caught:
        runner.run(InMemoryDataLoader(samples(bad=(BAD, 33))))
    assert f"samples {4 * 33}, " in str(caught.value)


def _two(folder: Path) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Replica 1 alone has the bad batch; both leave out their own batch of that update."""
    rank = torch.distributed.get_rank()
    changes = {**watching(folder), "distributed": {"data_parallel_size": 2}}
    runner, _ = start(folder, **changes)
    runner.run(InMemoryDataLoader(samples(rank, (BAD,) if rank else ())))
    return {name: tensor.numpy() for name, tensor in weights_of(runner).items()}, runner.state.course.spans


def test_all_ranks_return_together(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    (first, spans), (second, others) = run_on_ranks(2, _two, tmp_path)
    assert spans == others == [((0, 4 * BAD), (0, 4 * BAD + 4))]
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


def test_deviations() -> None:
    window = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert _deviations(3 + 1.4826 * 2, window, 0.05, is_relative=True) == pytest.approx(2)
    assert _deviations(1.1, [1.0] * 9, 0.05, is_relative=True) == pytest.approx(2), "losses that do not vary"
    assert _deviations(-5, window, 0.05, is_relative=True) < 0
    assert _deviations(5, [], 0.05, is_relative=True) == 0


def test_there_must_be_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(ParametersError, match=r"on_bad_loss\.spike_threshold is set, but checkpoint\.checkpoints_dir"):
        parameters(tmp_path, on_bad_loss={"spike_threshold": 20})

"""The fan-out: all get every event, and a failing watcher costs nobody else anything."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from onward.engine.reports import CheckpointReport, EvaluationReport, RunSummary, StepReport
from onward.errors import StorageError
from onward.report.metrics_file import MetricsFile
from onward.report.watching import Watchers, make_watchers
from tests.report.events import checkpoint_report, evaluation_report, run_summary, step_report


class Recorder:
    """Notes every event; fails at those it is told to."""

    def __init__(self, *failing: str) -> None:
        self.events: list[str] = []
        self.failing = failing

    def _note(self, event: str) -> None:
        self.events.append(event)
        if event.split(":")[0] in self.failing:
            raise StorageError(f"no room for {event}")

    def on_step(self, report: StepReport) -> None:
        self._note("step")

    def on_evaluation(self, report: EvaluationReport) -> None:
        self._note("evaluation")

    def on_checkpoint(self, report: CheckpointReport) -> None:
        self._note("checkpoint")

    def on_message(self, text: str) -> None:
        self._note(f"message:{text}")

    def on_end(self, summary: RunSummary) -> None:
        self._note("end")

    def close(self) -> None:
        self._note("close")


def _send_all(watchers: Watchers) -> None:
    watchers.on_step(step_report())
    watchers.on_evaluation(evaluation_report())
    watchers.on_checkpoint(checkpoint_report())
    watchers.on_message("hello")
    watchers.on_end(run_summary())
    watchers.close()


def test_every_event_goes_to_all() -> None:
    first, second = Recorder(), Recorder()
    watchers = Watchers([first, second])
    _send_all(watchers)
    assert first.events == second.events
    assert first.events == ["step", "evaluation", "checkpoint", "message:hello", "end", "close"]
    watchers.raise_failures()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_once(loss: float) -> None:
    recorder = Recorder()
    watchers = Watchers([recorder])
    watchers.on_step(step_report(10))
    assert recorder.events == ["step"]
    watchers.on_step(step_report(1200, loss=loss, skipped_updates=5))
    watchers.on_step(step_report(1210, loss=loss, skipped_updates=6))
    words = (
        f"message:the loss is {loss} at step 1200; 5 of 1,200 updates so far were skipped, because their gradients are"
    )
    assert [event.startswith(words) for event in recorder.events] == [False, False, True, False]
    assert "look for NaN and infinite values in the data" in recorder.events[2]
    assert "lower learning_rate.initial_lr or set optimizer.max_norm_clip" in recorder.events[2]


def test_a_watcher_that_fails_is_closed_and_the_others_are_notified() -> None:
    good, bad, last = Recorder(), Recorder("evaluation", "close"), Recorder()
    watchers = Watchers([good, bad, last])
    _send_all(watchers)
    told = "message:Recorder stops, training goes on: no room for evaluation"
    for recorder in (good, last):
        assert recorder.events == ["step", "evaluation", told, "checkpoint", "message:hello", "end", "close"]
    assert bad.events == ["step", "evaluation", "close"]
    with pytest.raises(StorageError, match="no room for evaluation") as caught:
        watchers.raise_failures()
    assert caught.value.__notes__ == ["closing it failed too: no room for close"]


def test_watchers_that_fail_one_after_the_other_end_in_silence_not_in_a_loop() -> None:
    watchers = Watchers([Recorder("step"), Recorder("message"), Recorder("message")])
    _send_all(watchers)
    assert watchers.watchers == ()
    assert [str(failure)[:16] for failure in watchers.failures] == ["no room for step", *["no room for mess"] * 2]
    with pytest.raises(StorageError, match="no room for step") as caught:
        watchers.raise_failures()
    assert len(caught.value.__notes__) == 2


def test_all_are_closed_whatever_closing_one_does() -> None:
    first, second = Recorder("close"), Recorder()
    watchers = Watchers([first, second])
    watchers.close()
    watchers.close()
    assert second.events == ["close"]
    assert len(watchers.failures) == 1


def test_a_run_has_console_metrics_and_tensorboard(tmp_path: Path) -> None:
    console = Recorder()
    watchers = make_watchers(
        console=console, metrics_path=tmp_path / "metrics.jsonl", tensorboard_dir=tmp_path / "tensorboard"
    )
    assert [type(w).__name__ for w in watchers.watchers] == ["Recorder", "MetricsFile", "TensorBoardWatcher"]
    _send_all(watchers)
    watchers.raise_failures()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert make_watchers().watchers == ()


def test_files_made_before_one_that_cannot_be_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    close = MetricsFile.close

    def note(file: MetricsFile) -> None:
        closed.append(file.path)
        close(file)

    monkeypatch.setattr(MetricsFile, "close", note)
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="TensorBoard events"):
        make_watchers(metrics_path=tmp_path / "metrics.jsonl", tensorboard_dir=tmp_path / "taken")
    assert closed == [tmp_path / "metrics.jsonl"]

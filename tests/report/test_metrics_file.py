"""`metrics.jsonl`: its records, what a resume keeps, and what a broken disk or file does."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.errors import StorageError
from onward.report.metrics_file import MetricsFile
from tests.report.events import checkpoint_report, evaluation_report, run_summary, step_report


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _read(path: Path) -> list[dict[str, Any]]:
    """Every record, by a parser that refuses what the JSON standard does not know."""
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def _write_one(path: Path) -> None:
    file = MetricsFile(path)
    file.on_step(step_report(10))
    file.close()


def test_every_event_is_a_record_with_all_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    file = MetricsFile(path, clock=lambda: 1234.5678)
    file.on_message("données prêtes")
    file.on_step(step_report(10, tensors={"w": torch.ones(3)}))
    file.on_evaluation(evaluation_report(10))
    file.on_checkpoint(checkpoint_report(10))
    file.on_end(run_summary())
    file.close()
    message, step, evaluation, checkpoint, end = _read(path)
    assert message == {"kind": "message", "time": 1234.568, "update": 0, "text": "données prêtes"}
    expected = dataclasses.asdict(step_report(10))
    del expected["tensors"], expected["module_paths"]
    assert step == {"kind": "step", "time": 1234.568, **expected}
    assert evaluation == {"kind": "evaluation", "time": 1234.568, **dataclasses.asdict(evaluation_report(10))}
    assert checkpoint == {"kind": "checkpoint", "time": 1234.568, **dataclasses.asdict(checkpoint_report(10))}
    assert end == {"kind": "end", "time": 1234.568, "update": 10, **dataclasses.asdict(run_summary())}


def test_numbers_that_json_does_not_know_are_strings_that_python_reads_back(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.on_step(step_report(1, loss=math.nan, gradient_norm=math.inf, learning_rate=-math.inf))
    file.on_evaluation(evaluation_report(1, {"loss": torch.tensor(0.5)}))  # type: ignore[dict-item]
    file.close()
    step, evaluation = _read(file.path)
    assert (step["loss"], step["gradient_norm"], step["learning_rate"]) == ("NaN", "Infinity", "-Infinity")
    assert math.isnan(float(step["loss"]))
    assert float(step["learning_rate"]) == -math.inf
    assert evaluation["metrics"] == {"loss": 0.5}


def test_each_record_is_on_disk_before_the_next(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for update in (1, 2, 3):
        file.on_step(step_report(update))
        assert [record["update"] for record in _read(file.path)] == list(range(1, update + 1))
    file.close()


def test_a_resume_drops_what_came_after_its_checkpoint_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for update in range(10, 60, 10):
        file.on_step(step_report(update))
        file.on_message(f"at {update}")
        if update == 30:
            file.on_checkpoint(checkpoint_report(30))
    file.close()
    file = MetricsFile(path, resumed_update=30)
    file.on_message("resumed")
    file.on_step(step_report(40))
    file.close()
    records = _read(path)
    assert [r["update"] for r in records if r["kind"] == "step"] == [10, 20, 30, 40]
    assert [r["text"] for r in records if r["kind"] == "message"] == ["at 10", "at 20", "at 30", "resumed"]
    assert [r["update"] for r in records if r["kind"] == "checkpoint"] == [30]
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_a_line_cut_short_by_a_kill_goes_silently(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write_one(path)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    file = MetricsFile(path, resumed_update=10)
    file.on_step(step_report(20))
    file.close()
    assert [record["update"] for record in _read(path)] == [10, 20]


def test_lines_that_are_no_records_go_with_a_word(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write_one(path)
    path.write_bytes(b"\0\0\0\n[1]\n" + path.read_bytes())
    MetricsFile(path, resumed_update=10).close()
    step, message = _read(path)
    assert step["update"] == 10
    assert message["text"] == "2 unreadable line(s) removed from metrics.jsonl"


def test_a_fresh_run_keeps_the_file_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for update in (1, 2, 3):
        file = MetricsFile(path)
        file.on_step(step_report(update))
        file.close()
    held = {p.name: _read(p)[0]["update"] for p in tmp_path.iterdir()}
    assert held == {"metrics-1.jsonl": 1, "metrics-2.jsonl": 2, "metrics.jsonl": 3}


def test_a_full_disk_is_a_storage_error_that_says_what_to_do(tmp_path: Path) -> None:
    """`/dev/full` is the kernel's own full disk."""
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = MetricsFile(path)
    with pytest.raises(StorageError, match=r"metrics\.jsonl: No space left on device; [\d,]+ bytes are free there"):
        file.on_step(step_report(1))
    file.close()


def test_a_disk_that_takes_half_a_line_keeps_whole_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.on_step(step_report(1))
    raw = file._file
    assert raw is not None

    class Short:
        def write(self, line: bytes) -> int:
            return raw.write(line[:10]) or 0

        def fileno(self) -> int:
            return raw.fileno()

    file._file = Short()  # type: ignore[assignment]
    with pytest.raises(StorageError, match="No space left"):
        file.on_step(step_report(2))
    raw.close()
    assert [record["update"] for record in _read(file.path)] == [1]


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write metrics to .*file/metrics\.jsonl: .*correct the path"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl")


def test_a_file_that_is_removed_while_the_run_goes_on_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    file = MetricsFile(folder / "metrics.jsonl")
    file.on_step(step_report(1))
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match=rf"cannot write metrics to {folder}/metrics\.jsonl: No such file"):
        file.on_step(step_report(2))
    file.close()


def test_a_closed_file_takes_nothing(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.close()
    file.close()
    with pytest.raises(StorageError, match="is closed"):
        file.on_message("late")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        MetricsFile(tmp_path / "metrics.jsonl", resumed_update=0).close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_nobody_closes_is_closed_when_it_is_dropped(tmp_path: Path) -> None:
    """A run that was not ended leaves no open file behind; pytest turns the warning of one into a failure."""
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.on_message("begun")
    del file
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        gc.collect()
    assert not shown

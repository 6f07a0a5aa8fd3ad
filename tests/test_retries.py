"""Storage that fails or stalls for a while: what is repeated, what is not, and what the user hears of it."""

from __future__ import annotations

import errno
import json
import logging
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onward.checkpoint.reading import find_latest, read_new_tensors
from onward.checkpoint.writing import CheckpointWriter
from onward.data.loader import DataLoader
from onward.data.shard_writer import ShardWriter
from onward.errors import DataError, StorageError
from onward.graph.writing.model_saving import save_model
from onward.report import metrics_file
from onward.report.metrics_file import MetricsFile
from onward.retries import RETRY_VARIABLE, Patience, persistently, reporting_stall
from onward.runner import TrainingRunner
from tests.faulty_storage import OPERATIONS, PASSING, Fault, faulty_storage
from tests.mlp import assert_same_bits, data, save_mlp, start, state_bits
from tests.report.events import step_report

LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EFBIG)
QUICK = Patience(5.0, 0.001, 0.01, 0.05)
WRITING = tuple(one for one in OPERATIONS if one not in ("read", "replace"))


def fails(number: int, times: int, made: type[Exception] | None = None) -> Any:
    """An action that fails so often and then gives how often it was called."""
    calls = []

    def action() -> int:
        calls.append(None)
        if len(calls) <= times:
            error = OSError(number, "it went wrong", "/mnt/file")
            if made is None:
                raise error
            raise made("the shard cannot be read: it went wrong.") from error
        return len(calls)

    return action


def seconds_said(error: Exception) -> int:
    """0 as a rule, but not where the machine was busy."""
    return int(str(error).partition(" times in ")[2].partition(" s)")[0])


@pytest.mark.parametrize("made", [None, DataError])
@pytest.mark.parametrize("number", PASSING)
def test_what_may_pass_is_repeated(number: int, made: type[Exception] | None, caplog: pytest.LogCaptureFixture) -> None:
    assert persistently(fails(number, 3, made), "reading x", QUICK) == 4
    first, *_, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("reading x failed (")
    assert "attempt 2 follows in 0.0 s, for 5 s more before it is given up" in first
    assert last == "reading x succeeded at attempt 4."


@pytest.mark.parametrize("number", LASTING)
def test_what_does_not_pass_is_reported_at_once(number: int, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="it went wrong") as caught:
        persistently(fails(number, 1), "reading x", Patience(5.0, 0.001, 0.01))
    assert caught.value.errno == number
    assert "tried" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert not caplog.records


@pytest.mark.parametrize("made", [None, DataError])
def test_what_lasts_too_long_says_how_often_it_was_tried(made: type[Exception] | None) -> None:
    started = time.monotonic()
    with pytest.raises(made or OSError, match=r"it went wrong\.? \(tried \d+ times in \d+ s\)") as caught:
        persistently(fails(errno.EIO, 10**9, made), "reading x", Patience(0.05, 0.001, 0.01))
    assert 0 <= seconds_said(caught.value) <= round(time.monotonic() - started)


def test_object_stores_repeat_by_themselves() -> None:
    def action() -> None:
        raise OSError(errno.EIO, "no such bucket", "s3://bucket/file")

    with pytest.raises(OSError, match="no such bucket") as caught:
        persistently(action, "reading x", QUICK)
    assert "tried" not in str(caught.value)


def test_the_environment_sets_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RETRY_VARIABLE, "0")
    with pytest.raises(OSError, match="it went wrong"):
        persistently(fails(errno.EIO, 1), "reading x")
    monkeypatch.setenv(RETRY_VARIABLE, "7.5")
    assert Patience.of_process().seconds == 7.5


# ---------------------------------------------------------------------------------------------------- checkpoints

TENSORS = {"weights/a": torch.arange(12.0).view(3, 4), "weights/b": torch.ones(5)}


def save(folder: Path, number: int = 2) -> dict[str, torch.Tensor]:
    with CheckpointWriter(folder, 2, blocking=True) as writer:
        writer.save(number, TENSORS, {})
    latest = find_latest(folder)
    assert latest is not None
    assert latest.name == f"checkpoint-{number:08d}"
    return read_new_tensors(latest)


@pytest.mark.parametrize("number", PASSING)
@pytest.mark.parametrize("operation", WRITING)
def test_checkpoint_survives_what_passes(
    operation: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", 1)
    with faulty_storage(monkeypatch) as storage:
        fault = storage.fail(operation, number)
        read = save(tmp_path / "c")
    assert fault.happened == 2
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["checkpoint-00000001", "checkpoint-00000002"]


@pytest.mark.parametrize("operation", [one for one in WRITING if one != "mkdir"])
def test_checkpoint_on_a_full_disk_is_one_attempt(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", 1)
    with faulty_storage(monkeypatch) as storage:
        fault = storage.fail(operation, errno.ENOSPC, match="checkpoint-00000002" if operation != "rename" else "")
        with pytest.raises(StorageError, match=r"No space left on device.*bytes are free.*Free some space"):
            save(tmp_path / "c")
    assert fault.happened == 1
    assert find_latest(tmp_path / "c") == tmp_path / "c" / "checkpoint-00000001"
    assert all(torch.equal(save(tmp_path / "c")[name], tensor) for name, tensor in TENSORS.items())


def test_a_checkpoint_that_is_given_up_says_how_often_it_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_storage(monkeypatch, Patience(0.05, 0.001, 0.01)) as storage:
        storage.fail("fsync", errno.EIO, 10**6, match="safetensors")
        started = time.monotonic()
        with pytest.raises(StorageError, match=r"Input/output error \(tried \d+ times in \d+ s\)") as caught:
            save(tmp_path / "c")
        assert 0 <= seconds_said(caught.value) <= round(time.monotonic() - started)


@pytest.mark.parametrize("operation", ["write", "fsync"])
def test_a_stalled_write_is_reported_while_it_lasts(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty_storage(monkeypatch) as storage:
        storage.stall(operation, 0.4, "safetensors")
        save(tmp_path / "c")
    said = [record.getMessage() for record in caplog.records]
    assert any("is not done: the file system does not answer." in line for line in said)
    assert any(line.startswith("writing ") and " ended after " in line for line in said)


@pytest.mark.parametrize("number", PASSING)
@pytest.mark.parametrize("operation", ["open", "read"])
def test_loading_survives_what_passes(
    operation: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_mlp(tmp_path)
    checkpoint = {"checkpoints_dir": tmp_path / "c"}
    trained, _ = start(tmp_path, checkpoint=checkpoint)
    trained.save_checkpoint()
    trained._initialized().checkpoints.close()
    with faulty_storage(monkeypatch) as storage:
        fault = storage.fail(operation, number, match="safetensors" if operation == "read" else "checkpoint-")
        resumed, _ = start(tmp_path, checkpoint=checkpoint)
    assert fault.happened == 2
    assert_same_bits(state_bits(resumed), state_bits(trained))


# --------------------------------------------------------------------------------------------------------- shards


def shards(folder: Path) -> Path:
    folder.mkdir()
    for file in range(3):
        with ShardWriter(folder / f"part-{file}.pb") as writer:
            for sample in range(4):
                writer.write({"x": np.array([file * 4 + sample], np.float32)})
    return folder


def values(folder: Path) -> list[float]:
    with DataLoader({}, folder) as loader:
        return [float(value) for batch in loader.one_pass(2) for value in batch.features["x"].ravel()]


@pytest.mark.parametrize("number", PASSING)
@pytest.mark.parametrize("operation", ["open", "read"])
def test_reading_shards_survives_what_passes(
    operation: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path / "d")
    with faulty_storage(monkeypatch) as storage:
        fault = storage.fail(operation, number, 3, match="part-1.pb")
        assert values(folder) == [float(value) for value in range(12)]
    assert fault.happened == 3


def test_a_shard_that_is_given_up_says_how_often_it_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shards(tmp_path / "d")
    with faulty_storage(monkeypatch, Patience(0.05, 0.001, 0.01)) as storage:
        storage.fail("read", errno.ESTALE, 10**6, match="part-1.pb")
        started = time.monotonic()
        with pytest.raises(DataError, match=r"part-1\.pb' cannot be read: .* \(tried \d+ times in \d+ s\)") as caught:
            values(folder)
        assert 0 <= seconds_said(caught.value) <= round(time.monotonic() - started)


# ------------------------------------------------------------------------------------------- metrics and models


class FailingFile(metrics_file.FileIO):
    """A file whose writes fail as `fault` says, each after its first three bytes."""

    fault: Fault

    def write(self, data: Any) -> int:
        if self.fault.happened < self.fault.times:
            super().write(bytes(data)[:3])
        self.fault.strike("write", self.name)
        return super().write(data)


@pytest.mark.parametrize("number", PASSING)
def test_metrics_keep_lines_while_the_file_system_fails(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "FileIO", FailingFile)
    monkeypatch.setattr(FailingFile, "fault", Fault("write", "", 2, number), raising=False)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        file.on_step(step_report(step))
    file.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_metrics_that_were_kept_are_written_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "FileIO", FailingFile)
    monkeypatch.setattr(FailingFile, "fault", Fault("write", "", 4, errno.EIO), raising=False)
    monkeypatch.setattr(Patience, "of_process", classmethod(lambda cls: QUICK))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.on_step(step_report(1))
    file.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


def test_metrics_on_a_full_disk_are_given_up_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "FileIO", FailingFile)
    monkeypatch.setattr(FailingFile, "fault", Fault("write", "", 1, errno.ENOSPC), raising=False)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(StorageError, match="No space left on device"):
        file.on_step(step_report(1))
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize("number", PASSING)
@pytest.mark.parametrize("operation", ["open", "write", "replace"])
def test_writing_a_model_survives_what_passes(
    operation: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_mlp(tmp_path)
    (path,) = tmp_path.glob("*.onnx")
    model, target = ir.load(path), tmp_path / "trained.onnx"
    with faulty_storage(monkeypatch) as storage:
        fault = storage.fail(operation, number, match="trained.onnx")
        save_model(model, target)
    assert fault.happened == 2
    assert {n: v.const_value.numpy().tolist() for n, v in ir.load(target).graph.initializers.items()} == {
        n: v.const_value.numpy().tolist() for n, v in model.graph.initializers.items()
    }


def test_warnings_about_storage_have_their_own_logger() -> None:
    """Whoever configures "onward" hears of them; `onward train` shows them whatever else it shows."""
    assert logging.getLogger("onward.storage").parent is logging.getLogger("onward")


@pytest.mark.parametrize("seed", range(4))
def test_a_run_on_a_failing_disk_ends_with_the_bits_of_a_run_on_a_good_one(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards, checkpoints, metrics and record of a run, each with faults drawn at random."""
    draw = random.Random(seed)
    save_mlp(tmp_path)
    write_shards(tmp_path / "d", 4)
    good = run(tmp_path, tmp_path / "good")
    with faulty_storage(monkeypatch) as storage:
        for _ in range(30):
            operation = draw.choice([one for one in OPERATIONS if one != "mkdir"])
            match = draw.choice([".pb", ".safetensors", "manifest.json", "checkpoint-", "run.json", "directory"])
            storage.fail(operation, draw.choice(PASSING), draw.randrange(1, 3), match)
        bad = run(tmp_path, tmp_path / "bad")
    assert sum(fault.happened for fault in storage.faults) > 4
    assert_same_bits(state_bits(bad), state_bits(good))


def write_shards(folder: Path, count: int) -> None:
    features = data(4 * count)
    folder.mkdir()
    for file in range(count):
        with ShardWriter(folder / f"part-{file}.pb") as writer:
            for sample in range(4 * file, 4 * file + 4):
                writer.write({name: np.asarray(rows[sample]) for name, rows in features.items()})


def run(folder: Path, out: Path) -> TrainingRunner:
    runner, _ = start(
        folder,
        paths={"output_dir": out},
        checkpoint={"checkpoints_dir": out / "c", "checkpoint_period": 1},
        training={"num_train_steps": 6},
    )
    with DataLoader({}, folder / "d") as loader:
        runner.run(loader)
    runner.end_training()
    return runner


def test_a_clock_that_stands_still_ends_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are counted, so that what fails for ever is given up."""
    paused: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    monkeypatch.setattr(time, "sleep", paused.append)

    def fail() -> None:
        if len(paused) > 1000:
            raise AssertionError("it is repeated for ever")
        raise OSError(errno.EIO, "Input/output error", "a")

    with pytest.raises(OSError, match=r"Input/output error \(tried \d+ times in 5 s\)"):
        persistently(fail, "writing a", Patience(5.0, 0.1, 1.0, 30.0))
    assert sum(paused) == pytest.approx(5.0)


def test_a_stall_is_reported_at_growing_distances_by_any_clock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    with caplog.at_level(logging.WARNING), reporting_stall("writing a", 0.02):
        time.sleep(0.5)
    lines = [record.getMessage() for record in caplog.records if "is not done" in record.getMessage()]
    assert 1 <= len(lines) <= 6

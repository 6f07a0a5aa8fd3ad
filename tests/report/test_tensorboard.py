"""Event files as TensorBoard's own reader sees them."""

from __future__ import annotations

import errno
import math
import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onward.errors import ParametersError, StorageError
from onward.report.tensorboard import TensorBoardWatcher
from tests.faulty_storage import faulty_storage
from tests.report.events import checkpoint_report, evaluation_report, run_summary, step_report


def _read(log_dir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(log_dir), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def _points(log_dir: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in _read(log_dir).Scalars(tag)]


def test_training_and_evaluation_have_updates_as_their_axis(tmp_path: Path) -> None:
    watcher = TensorBoardWatcher(tmp_path)
    for update in (10, 20):
        watcher.on_step(
            step_report(
                update,
                step=4 * update,
                loss=1.0 / update,
                tokens_per_second=38_100.0,
                loss_scale=65536.0,
                skipped_updates=1,
            )
        )
    watcher.on_evaluation(evaluation_report(20, {"loss": 0.25, "accuracy": 0.5}))
    watcher.on_checkpoint(checkpoint_report(20))
    watcher.on_message("nothing of this is a chart")
    watcher.on_end(run_summary())
    watcher.close()
    expected = {
        "train/loss": [0.1, 0.05],
        "train/learning_rate": [3.2e-4] * 2,
        "train/gradient_norm": [1.25] * 2,
        "train/loss_scale": [65536.0] * 2,
        "train/skipped_updates": [1.0] * 2,
        "train/samples_per_second": [12_345.0] * 2,
        "train/tokens_per_second": [38_100.0] * 2,
    }
    assert set(_read(tmp_path).Tags()["scalars"]) == {*expected, "test/loss", "test/accuracy"}
    for tag, values in expected.items():
        points = _points(tmp_path, tag)
        assert [step for step, _ in points] == [10, 20]
        assert [value for _, value in points] == pytest.approx(values)
    assert _points(tmp_path, "test/loss") == [(20, 0.25)]
    assert _points(tmp_path, "test/accuracy") == [(20, 0.5)]


def test_what_a_run_does_not_have_makes_no_chart(tmp_path: Path) -> None:
    watcher = TensorBoardWatcher(tmp_path)
    watcher.on_step(step_report(1, loss=math.nan))
    watcher.close()
    tags = _read(tmp_path).Tags()["scalars"]
    assert "train/loss_scale" not in tags
    assert "train/tokens_per_second" not in tags
    assert math.isnan(_points(tmp_path, "train/loss")[0][1])


def test_named_tensors_become_scalars_histograms_and_norms(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 40, generator=generator)
    tensors = {
        "h.0/attn::weight:0": weight,
        "h.0/attn::weight:0_grad": weight.bfloat16(),
        "scale": torch.tensor([[2.5]]),
    }
    watcher = TensorBoardWatcher(tmp_path, ["scale"], ["h.0/attn::weight:0"], ["*weight*", "h.0/attn::weight:0"])
    watcher.on_step(step_report(3, tensors=tensors))
    watcher.close()
    assert _points(tmp_path, "train/scalar/scale") == [(3, 2.5)]
    norm = weight.double().norm().item()
    assert _points(tmp_path, "train/norm/h.0/attn::weight:0") == [(3, pytest.approx(norm, rel=1e-6))]
    assert _points(tmp_path, "train/norm/h.0/attn::weight:0_grad") == [(3, pytest.approx(norm, rel=1e-2))]
    (event,) = _read(tmp_path).Histograms("train/histogram/h.0/attn::weight:0")
    histogram = event.histogram_value
    assert (event.step, histogram.num) == (3, 2000)
    assert (histogram.min, histogram.max) == (pytest.approx(weight.min().item()), pytest.approx(weight.max().item()))
    assert histogram.sum == pytest.approx(weight.double().sum().item(), rel=1e-6)
    assert histogram.sum_squares == pytest.approx(norm**2, rel=1e-6)
    counts, _ = torch.histogram(weight, 64)
    assert histogram.bucket == counts.tolist()
    assert histogram.bucket_limit[-1] == pytest.approx(weight.max().item())


def test_histograms_of_constants_and_of_values_that_are_not_finite(tmp_path: Path) -> None:
    tensors = {
        "zeros": torch.zeros(7),
        "mixed": torch.tensor([1.0, math.nan, 3.0, math.inf]),
        "lost": torch.full((5,), math.nan),
    }
    watcher = TensorBoardWatcher(tmp_path, histogram_names=["*"])
    watcher.on_step(step_report(1, tensors=tensors))
    watcher.close()
    read = _read(tmp_path)
    assert set(read.Tags()["histograms"]) == {"train/histogram/zeros", "train/histogram/mixed"}
    assert read.Histograms("train/histogram/zeros")[0].histogram_value.bucket == [7.0]
    mixed = read.Histograms("train/histogram/mixed")[0].histogram_value
    assert (mixed.num, mixed.min, mixed.max, sum(mixed.bucket)) == (2, 1.0, 3.0, 2.0)
    assert _points(tmp_path, "train/non_finite/mixed") == [(1, 2.0)]
    assert _points(tmp_path, "train/non_finite/lost") == [(1, 5.0)]


def test_a_resumed_run_has_no_double_and_no_backward_points(tmp_path: Path) -> None:
    """A run dies at update 50 and continues from its checkpoint at 30: other values, each update once, in order."""
    first = TensorBoardWatcher(tmp_path)
    for update in range(10, 60, 10):
        first.on_step(step_report(update, loss=1.0))
    first.on_evaluation(evaluation_report(30, {"loss": 1.0}))
    first.on_evaluation(evaluation_report(50, {"loss": 1.0}))
    first.close()
    second = TensorBoardWatcher(tmp_path, resumed_update=30)
    for update in (35, 45):
        second.on_step(step_report(update, loss=2.0))
    second.close()
    assert _points(tmp_path, "train/loss") == [(10, 1.0), (20, 1.0), (30, 1.0), (35, 2.0), (45, 2.0)]
    assert _points(tmp_path, "test/loss") == [(30, 1.0)]


def test_a_fresh_run_in_the_same_folder_hides_the_earlier_one(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        watcher = TensorBoardWatcher(tmp_path)
        watcher.on_step(step_report(10, loss=loss))
        watcher.on_step(step_report(int(40 / loss), loss=loss))
        watcher.close()
    assert _points(tmp_path, "train/loss") == [(10, 2.0), (20, 2.0)]
    assert len(list(tmp_path.iterdir())) == 2, "nothing is deleted"


def test_a_name_that_stands_for_nothing_is_refused_with_what_there_is(tmp_path: Path) -> None:
    watcher = TensorBoardWatcher(tmp_path, norm_names=["h.1.*"])
    with pytest.raises(ParametersError, match=r"norm_names: 'h\.1\.\*' stands for no .*reported are: h\.0, h\.2\."):
        watcher.on_step(step_report(1, tensors={"h.2": torch.ones(1), "h.0": torch.ones(1)}))
    watcher.close()


def test_a_scalar_has_one_element(tmp_path: Path) -> None:
    watcher = TensorBoardWatcher(tmp_path, scalar_names=["w"])
    with pytest.raises(ParametersError, match=r"scalar_names: 'w' has shape \[2, 3\]; .*norm_names or histogram"):
        watcher.on_step(step_report(1, tensors={"w": torch.ones(2, 3)}))
    watcher.close()


def test_a_full_disk_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = TensorBoardWatcher(tmp_path)
    message = r"TensorBoard events to .*: No space left on device.*log_dir"
    with faulty_storage(monkeypatch) as storage:
        storage.fail("write", errno.ENOSPC, times=1, match="tfevents")
        with pytest.raises(StorageError, match=message):
            _write_many(watcher)
    with pytest.raises(StorageError, match=message):
        watcher.close()
    watcher.close()


def test_events_of_a_failing_file_system_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = TensorBoardWatcher(tmp_path)
    with faulty_storage(monkeypatch) as storage:
        storage.fail("write", errno.EIO, times=2, match="tfevents")
        storage.fail("open", errno.ESTALE, times=1, match="tfevents")
        for update in range(1, 6):
            watcher.on_step(step_report(update, loss=float(update)))
            watcher.on_checkpoint(checkpoint_report(update))
    watcher.close()
    assert _points(tmp_path, "train/loss") == [(update, float(update)) for update in range(1, 6)]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_that_is_removed_while_the_run_goes_on_is_named_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    watcher = TensorBoardWatcher(folder)
    watcher.on_step(step_report(1))
    watcher.on_checkpoint(checkpoint_report(1))
    shutil.rmtree(folder)
    with pytest.raises(StorageError, match=rf"TensorBoard events to {folder}: No such file or directory"):
        _write_many(watcher)
    folder.mkdir()
    with pytest.raises(StorageError, match="No such file"):
        watcher.close()
    assert list(folder.iterdir()) == [], "events without their beginning are no file that TensorBoard reads"
    assert capfd.readouterr().err == ""


def _write_many(watcher: TensorBoardWatcher) -> None:
    for update in range(1, 100):
        watcher.on_step(step_report(update))
    watcher.on_end(run_summary())  # waits for the thread that writes


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="taken"):
        TensorBoardWatcher(tmp_path / "taken")


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    watcher = TensorBoardWatcher(tmp_path)
    watcher.close()
    watcher.close()
    with pytest.raises(StorageError, match="is closed"):
        watcher.on_step(step_report())

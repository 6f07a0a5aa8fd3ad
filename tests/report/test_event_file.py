"""A file of events: written by a thread, framed as TensorBoard reads them, and errors that reach the caller."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.summary_pb2 import Summary

from onward.report.event_file import EventFile


def values(path: Path) -> list[tuple[int, float]]:
    found = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    return [(event.step, round(event.summary.value[0].tensor.float_val[0], 3)) for event in found]


def point(value: float) -> Summary:
    return Summary(value=[Summary.Value(tag="a", simple_value=value)])


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "deep" / "logs")
    for update in range(50):
        file.add_summary(point(update / 10), update)
    file.flush()
    assert len(values(file.path)) == 50
    file.add_summary(point(7.5), 99)
    file.close()
    assert values(file.path)[-1] == (99, 7.5)


def test_two_files_at_once_have_names_of_their_own(tmp_path: Path) -> None:
    first, second = EventFile(tmp_path), EventFile(tmp_path)
    assert first.path != second.path
    assert sorted([second.path, first.path]) == [first.path, second.path]
    for one in (first, second):
        one.close()


def test_a_file_that_was_removed_is_an_error_and_is_not_made_anew(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.path.unlink()
    file.add_summary(point(1.0))
    with pytest.raises(FileNotFoundError) as caught:
        file.flush()
    assert caught.value.filename == str(file.path)
    with pytest.raises(FileNotFoundError):  # each call tells it
        file.add_summary(point(2.0))
    with pytest.raises(FileNotFoundError):
        file.close()
    assert not file.path.exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        EventFile(tmp_path / "file" / "logs")

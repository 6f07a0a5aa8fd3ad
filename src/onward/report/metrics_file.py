"""`metrics.jsonl`: every event of a run as one JSON object in a line, for programs that read what a person watched.

A resumed run continues in the same file, without what a killed run wrote after the checkpoint it resumes from.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

from onward.engine.reports import CheckpointReport, EvaluationReport, RollBackReport, RunSummary, StepReport
from onward.errors import StorageError
from onward.retries import is_passing, persistently
from onward.untrusted_files import open_regular, parse_json

LARGEST_KEPT_BYTES = 16 * 2**20
"""Lines that are kept while the file system fails; with more, the file is given up."""

_LOGGER = logging.getLogger("onward.storage")


class JsonEvents:
    """Turns events into records, one JSON object each: `{"kind": "step", "time": 1767225600.0, "loss": 5.1, ...}`.

    Kinds are step, evaluation, checkpoint, roll_back, message and end, with the fields of the event's class (without a
    step's `tensors` and their paths). Every record holds `time` (seconds since 1970) and `update` (of the event, or the
    last one before it). JSON has no NaN: a number that is not finite is the string "NaN", "Infinity" or "-Infinity".

    Args:
        write: takes each line, its end included.
        update: weight updates done before.
        clock: seconds since 1970.
    """

    def __init__(self, write: Callable[[bytes], None], update: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._write_line = write
        self._update = update
        self._clock = clock

    def on_step(self, report: StepReport) -> None:
        """Writes a record of kind "step"."""
        self._update = report.update
        self._write("step", report, leave_out=("tensors", "module_paths"))

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Writes a record of kind "evaluation"."""
        self._update = report.update
        self._write("evaluation", report)

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Writes a record of kind "checkpoint"."""
        self._update = report.update
        self._write("checkpoint", report)

    def on_roll_back(self, report: RollBackReport) -> None:
        """Writes a record of kind "roll_back"; records of later updates than its `returned_to` before it are void."""
        self._update = report.update
        self._write("roll_back", report)
        self._update = report.returned_to

    def on_message(self, text: str) -> None:
        """Writes a record of kind "message"."""
        self._append({"kind": "message", "time": self._now(), "update": self._update, "text": text})

    def on_end(self, summary: RunSummary) -> None:
        """Writes a record of kind "end"; its `update` counts over all rounds, its `updates` in this one."""
        self._write("end", summary)

    def close(self) -> None:
        """Does nothing: each line was written at once."""

    def _now(self) -> float:
        return round(self._clock(), 3)

    def _write(self, kind: str, event: Any, leave_out: Collection[str] = ()) -> None:
        record = {"kind": kind, "time": self._now(), "update": self._update}
        record |= {f.name: getattr(event, f.name) for f in fields(event) if f.name not in leave_out}
        self._append(record)

    def _append(self, record: Mapping[str, Any]) -> None:
        self._write_line(json.dumps(as_json(record), ensure_ascii=False, allow_nan=False).encode() + b"\n")


class JsonConsole(JsonEvents):
    """Every event of a run as a line of JSON on a stream, for programs that start runs: `onward train --json`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        out = sys.stdout if stream is None else stream

        def write(line: bytes) -> None:
            out.write(line.decode())
            out.flush()

        super().__init__(write)


class MetricsFile(JsonEvents):
    """The records of `JsonEvents` in a file.

    Each line is written at once and completely, so that a reader can follow and a killed run loses none. Where the file
    system fails for a passing reason, lines are kept and written with a later one, so that training does not wait.

    Args:
        path: the file; its directory is made.
        resumed_update: the update of the checkpoint from which the run resumes; records of later updates are dropped.
            None for a fresh run: a file of an earlier run is kept as `<name>-<number>`.
        clock: seconds since 1970.

    Raises:
        StorageError: the file cannot be written; also from every event.
    """

    def __init__(
        self, path: str | Path, resumed_update: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(self._write_whole, resumed_update or 0, clock)
        self.path = Path(path)
        self._file: FileIO | None = None
        self._kept = b""
        removed = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_file():
                if resumed_update is None:
                    self.path.rename(_free_name(self.path))
                else:
                    removed = _drop_later_records(self.path, resumed_update)
            self._file = FileIO(self.path, "ab")
            weakref.finalize(self, self._file.close)  # of a run that nobody ends
        except OSError as error:
            raise _storage_error(self.path, error) from error
        if removed:
            self.on_message(f"{removed} unreadable line(s) removed from {self.path.name}")

    def close(self) -> None:
        """Writes what is kept, now with patience, and closes the file."""
        if self._file is None:
            return
        try:
            if self._kept:
                persistently(lambda: self._append_to_file(self._kept), f"writing {self.path}")
        except OSError as error:
            raise _storage_error(self.path, error) from error
        finally:
            self._file.close()
            self._file = None

    def _write_whole(self, line: bytes) -> None:
        if self._file is None:
            raise StorageError(f"{self.path} is closed; no event can be written to it.")
        lines, self._kept = self._kept + line, b""
        try:
            self._append_to_file(lines)
        except OSError as error:
            if not is_passing(error) or len(lines) > LARGEST_KEPT_BYTES:
                raise _storage_error(self.path, error) from error
            if lines == line:
                _LOGGER.warning("%s: %s; lines are kept and written later.", self.path, error.strerror)
            self._kept = lines

    def _append_to_file(self, lines: bytes) -> None:
        assert self._file is not None
        if not self.path.exists():  # removed: what is written now is lost
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        before = os.fstat(self._file.fileno()).st_size
        written = 0
        try:
            written = self._file.write(lines) or 0
            if written != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            # A disk with a few bytes left takes the start of a line: leave complete lines only.
            if written != len(lines) and os.fstat(self._file.fileno()).st_size > before:
                os.ftruncate(self._file.fileno(), before)


def as_json(value: Any) -> Any:
    """The value with numbers that JSON does not know as strings, and numpy's or torch's as Python's."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def _free_name(path: Path) -> Path:
    """`metrics-1.jsonl`, or the first number after it that no file has."""
    number = 1
    while (candidate := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return candidate


def _drop_later_records(path: Path, last_update: int) -> int:
    """Rewrites a file without records after an update; returns how many complete lines were unreadable.

    The last line of a killed machine may be cut short; it goes without a word, since its event comes again.
    """
    unreadable = 0
    changed = False
    partial = path.with_name(f"{path.name}.partial")
    with open_regular(path) as old, open(partial, "wb") as new:
        for line, record in _records(old):
            if record is not None and record["update"] <= last_update:
                new.write(line)
                continue
            changed = True
            unreadable += record is None and line.endswith(b"\n")
        new.flush()
        os.fsync(new.fileno())
    if changed:
        os.replace(partial, path)
    else:
        partial.unlink()
    return unreadable


def _records(lines: Iterator[bytes] | Any) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Every line with its record, or with None where it is not a complete one."""
    for line in lines:
        record = None
        if line.endswith(b"\n"):
            try:
                record = parse_json(line)
            except ValueError:
                record = None
        is_record = isinstance(record, dict) and isinstance(record.get("update"), int)
        yield line, record if is_record else None


def _storage_error(path: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = f"; {shutil.disk_usage(path.parent).free:,} bytes are free there"
        except OSError:
            free = ""
        advice = "Free some space on that disk, or set another path, and start again: the run resumes."
        return StorageError(f"cannot write metrics to {path}: {reason}{free}. {advice}")
    return StorageError(
        f"cannot write metrics to {path}: {reason}. Expected a file that can be written in an existing or new "
        "directory; correct the path or its permissions."
    )

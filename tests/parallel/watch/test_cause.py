"""What ended a worker, left for its launcher; anything else in its place is no cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.errors import OutOfMemoryError
from onward.parallel.watch.cause import CAUSE_FILE, Cause, cause_of, leave_cause, out_of_memory, read_cause


def test_a_cause_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cause"
    monkeypatch.setenv(CAUSE_FILE, str(path))
    cause = Cause("out of memory", "größe\nmore", 7, 32)
    leave_cause(cause)
    assert read_cause(path) == cause
    assert cause.first_line == "größe"


def test_nobody_who_looks_and_a_place_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CAUSE_FILE, raising=False)
    leave_cause(Cause("error", "a"))
    monkeypatch.setenv(CAUSE_FILE, str(tmp_path / "none" / "cause"))
    leave_cause(Cause("error", "a"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "[]", "3", '{"kind": "error"}', '{"other": 1}', "null", '"text"'])
def test_what_is_no_cause(content: str, tmp_path: Path) -> None:
    (tmp_path / "cause").write_text(content)
    assert read_cause(tmp_path / "cause") is None
    assert read_cause(tmp_path / "none") is None


def test_memory_is_found_among_the_causes_of_an_exception() -> None:
    ran_out = MemoryError()
    outer = ValueError("outer")
    outer.__cause__ = ran_out
    assert out_of_memory(outer) is ran_out
    assert cause_of(outer, "t", 3) == Cause("out of memory", "t", 3)
    by_torch = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
    assert out_of_memory(by_torch) is by_torch
    assert out_of_memory(RuntimeError("other")) is None
    assert out_of_memory(None) is None
    assert cause_of(KeyError("x"), "t", 3).kind == "error"


def test_the_batch_that_did_not_fit_is_noted() -> None:
    assert cause_of(OutOfMemoryError("too large", 16), "t", 1).batch_size == 16

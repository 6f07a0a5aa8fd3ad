"""Clocks that stand still or jump."""

from __future__ import annotations

import pytest

from onward.diagnosis.clock import check_clock


def test_clocks_that_go() -> None:
    (found,) = check_clock()
    assert (found.status, found.text) == ("ok", "advances as it should")


def test_a_clock_that_jumps_is_named_and_the_other_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 50.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("time.monotonic", iter([1.0, 1.05]).__next__)
    (found,) = check_clock()
    assert found.status == "problem"
    assert found.text == "the performance counter advanced by -50.000 s in a sleep of 0.05 s; nothing was timed"

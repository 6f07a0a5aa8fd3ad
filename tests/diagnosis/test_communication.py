"""Processes that cannot communicate."""

from __future__ import annotations

import pytest

from onward.diagnosis import communication
from onward.diagnosis.communication import check_communication


def test_processes_that_cannot_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "launch_workers", lambda *_: 1)
    (problem,) = check_communication(2, 0.1)
    assert problem.status == "problem"
    assert problem.text == "2 processes on this machine's cpu cannot communicate (exit code 1; see above)"
    (note,) = check_communication(1, 0.1)
    assert note.status == "note"

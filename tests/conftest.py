"""What holds for all tests."""

from __future__ import annotations

import functools
import gc

import pytest

from onward.report.phases import Phases


def pytest_collection_finish() -> None:
    """What is imported by now stays: walking through it would take half the time of a small training run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _patient_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine any command may take longer than a second; what it says of that is tested by itself."""
    monkeypatch.setattr("onward.cli.Phases", functools.partial(Phases, announced_after_seconds=600.0))

"""What holds for all tests."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from onward.report.phases import Phases

WITHOUT_WARNINGS = (
    "diagnosis", "exclusive", "graph/nodes", "graph/repair", "models", "optim", "parameters", "plan", "remote",
)  # fmt: skip
"""Folders in whose tests a warning is an error; a warning that a test provokes is asserted by it (`pytest.warns`)."""
_FROM_ELSEWHERE = ("default::ResourceWarning", "default::pytest.PytestUnraisableExceptionWarning")
"""A file that a test of another folder left open may be collected during any later test."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of `WITHOUT_WARNINGS` fail at a warning; their own filters come later and win."""
    folders = [Path(__file__).parent / name for name in WITHOUT_WARNINGS]
    for item in items:
        if any(folder in item.path.parents for folder in folders):
            item.add_marker(pytest.mark.filterwarnings("error", *_FROM_ELSEWHERE), append=False)


@pytest.fixture(autouse=True)
def _patient_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine any command may take longer than a second; what it says of that is tested by itself."""
    monkeypatch.setattr("onward.cli.Phases", functools.partial(Phases, announced_after_seconds=600.0))

"""A model and data of a kind, in a working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proposal.kinds import Kind


def prepare(kind: Kind, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Writes model and data, and makes their folder the working one."""
    monkeypatch.chdir(folder)
    kind.model(folder)
    return kind.data(folder)

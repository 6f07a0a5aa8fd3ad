"""Disks that are full, read-only, or too small for NCCL."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onward.diagnosis import disks
from onward.diagnosis.disks import check_disks


def test_disks_that_are_full_or_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (written, *_) = check_disks(tmp_path)
    assert written.text.startswith(f"this folder ({tmp_path}): ")
    assert written.text.endswith(" MB/s")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(disks.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6, total=64 * 2**20))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    full, *_, shared = check_disks(tmp_path)
    assert (full.status, full.remedy) == (
        "note",
        "Free some space: a checkpoint with AdamW takes 12 bytes per parameter.",
    )
    assert (shared.status, shared.remedy) == ("problem", "Start the container with --shm-size=8g or --ipc=host.")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disks.tempfile, "TemporaryDirectory", refuse)
    refused, *_ = check_disks(tmp_path)
    assert refused.text == f"this folder ({tmp_path}) cannot be written: Permission denied"
    assert refused.status == "problem"

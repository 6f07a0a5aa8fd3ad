"""Free space and write speed where a run writes: its folder, the folder of temporary files, shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from onward.diagnosis.findings import Finding
from onward.report.formatting import format_bytes

TRIAL_BYTES = 64 * 2**20
SMALL_DISK_BYTES = 5e9
SMALL_SHARED_BYTES = 1e9
"""NCCL communicates between GPUs of one machine through /dev/shm; Docker's default is 64 MiB."""


def check_disks(folder: Path) -> Iterator[Finding]:
    """The folder in which runs are to be written, temporary files, and shared memory on machines with several GPUs."""
    yield _check_folder(folder.resolve())
    temporary = Path(tempfile.gettempdir())
    if temporary.resolve() != folder.resolve():
        yield _space("temporary files", temporary)
    shared = Path("/dev/shm")
    if torch.cuda.device_count() > 1 and shared.is_dir():
        total = shutil.disk_usage(shared).total
        if total < SMALL_SHARED_BYTES:
            yield Finding(
                "disk",
                f"{shared}: {format_bytes(total)}, which is too small for NCCL",
                "problem",
                "Start the container with --shm-size=8g or --ipc=host.",
            )
        else:
            yield Finding("disk", f"{shared}: {format_bytes(total)}")


def _space(what: str, folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    text = f"{what} ({folder}): {format_bytes(free)} free"
    if free < SMALL_DISK_BYTES:
        return Finding("disk", text, "note", "Free some space: a checkpoint with AdamW takes 12 bytes per parameter.")
    return Finding("disk", text)


def _check_folder(folder: Path) -> Finding:
    """Writes, makes durable, renames and removes a file, as a checkpoint is written."""
    try:
        with tempfile.TemporaryDirectory(prefix=".onward-doctor-", dir=folder) as inside:
            path, data = Path(inside) / "written", os.urandom(2**20)
            started = time.perf_counter()
            with path.open("wb") as file:
                for _ in range(TRIAL_BYTES // len(data)):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            seconds = time.perf_counter() - started
            path.rename(path.with_name("renamed"))
    except OSError as error:
        return Finding(
            "disk",
            f"this folder ({folder}) cannot be written: {error.strerror or error}",
            "problem",
            "Change to a writable folder, or pass one with --folder.",
        )
    found = _space("this folder", folder)
    return Finding(
        "disk", f"{found.text}, writes {TRIAL_BYTES / 1e6 / max(seconds, 1e-9):,.0f} MB/s", found.status, found.remedy
    )

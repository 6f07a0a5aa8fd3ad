"""Writers of checkpoints on ranks, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from onward.checkpoint.writing import CheckpointWriter
from onward.errors import OnwardError


def writer_of(directory: Path, **options: Any) -> CheckpointWriter:
    return CheckpointWriter(directory, 2, group=dist.group.WORLD, **options)


def message_of(action: Callable[[], object]) -> str:
    """Class and words of the error that onward raises."""
    try:
        action()
    except OnwardError as error:
        return f"{type(error).__name__}: {error}"
    return ""

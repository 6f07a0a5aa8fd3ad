"""What ended a worker, in kind and in words, left in a file for the launcher that decides whether to start it again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from onward.errors import OutOfMemoryError, chain_of
from onward.untrusted_files import parse_json, read_text

CAUSE_FILE = "ONWARD_CAUSE_FILE"
"""Environment variable of workers that `onward train` started: where the first one that fails says why."""

Kind = Literal["error", "hang", "death", "out of memory"]


@dataclass(frozen=True)
class Cause:
    """Why a launch ended.

    Attributes:
        kind: an exception; ranks that waited for each other too long; a process that ended without a word; no memory.
        text: what was shown.
        updates: since the start of the process that says so.
        batch_size: the micro-batch that memory did not suffice for, where it is known.
    """

    kind: Kind
    text: str
    updates: int = 0
    batch_size: int | None = None

    @property
    def first_line(self) -> str:
        """The text without what follows its first line."""
        return self.text.partition("\n")[0]


def cause_of(error: BaseException, text: str, updates: int) -> Cause:
    """The cause that an exception is."""
    ran_out = out_of_memory(error)
    if ran_out is None:
        return Cause("error", text, updates)
    return Cause("out of memory", text, updates, getattr(ran_out, "batch_size", None))


def leave_cause(cause: Cause) -> None:
    """Writes the cause where the launcher of this process looks for it, if it has one that does."""
    path = os.environ.get(CAUSE_FILE)
    if path:
        with contextlib.suppress(OSError):  # the launcher sees the exit code in any case
            Path(path).write_text(json.dumps(dataclasses.asdict(cause)), encoding="utf-8")


def read_cause(path: Path) -> Cause | None:
    """What a worker left; None: nothing that can be read."""
    try:
        return Cause(**parse_json(read_text(path)))
    except (OSError, ValueError, TypeError):
        return None


def out_of_memory(error: BaseException | None) -> BaseException | None:
    """The exception, among this one and its causes, which says that memory ran out; None: none does."""
    for one in chain_of(error):
        if isinstance(one, (OutOfMemoryError, torch.OutOfMemoryError, MemoryError)):
            return one
        if isinstance(one, RuntimeError) and "DefaultCPUAllocator" in str(one):
            return one
    return None

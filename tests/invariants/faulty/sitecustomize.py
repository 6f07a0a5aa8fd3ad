"""Makes `onward train` fail as the environment says: every process that finds this file in its path imports it first.

`FAULT` is `kind,rank,update[,once file]`: after that update of the process, on that rank, until the file is there.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SLOW_SECONDS = 0.05
"""That a slow rank takes longer for each step."""
_import = builtins.__import__


def _importing(name: str, *others: Any, **options: Any) -> Any:
    """As usual; as soon as the loop is imported it gets its fault."""
    module = _import(name, *others, **options)
    rounds = sys.modules.get("onward.engine.building.rounds")
    if hasattr(rounds, "round_steps"):
        builtins.__import__ = _import
        _make_faulty(rounds)
    return module


def _make_faulty(rounds: Any) -> None:
    train_steps = rounds.train_steps
    kind, rank, update, *once = os.environ["FAULT"].split(",")

    def faulty_steps(steps: Any, *arguments: Any) -> Iterator[Any]:
        done = 0
        for step in train_steps(steps, *arguments):
            done += step.is_update
            if kind == "slow" and os.environ.get("RANK", "0") == rank:
                time.sleep(SLOW_SECONDS)
            is_due = done == int(update) and step.is_update and os.environ.get("RANK", "0") == rank
            if is_due and not any(Path(file).exists() for file in once):
                for file in once:
                    Path(file).touch()
                _fail(kind, steps)
            yield step

    rounds.train_steps = faulty_steps


def _fail(kind: str, steps: Any) -> None:
    import torch

    from onward.errors import DataError

    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "bug":
        raise ZeroDivisionError("a bug")
    if kind == "mistake":
        raise DataError("the shard lies.")
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        ctypes.PyDLL(None).sleep(600)  # keeps Python's lock
    # memory4: suffices for micro-batches of 4, of the 8 samples of an update
    if kind.startswith("memory") and steps.accumulation < 8 // int(kind.removeprefix("memory")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


if "FAULT" in os.environ:
    builtins.__import__ = _importing

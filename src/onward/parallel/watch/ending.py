"""How a process of a run ends, and which exceptions only follow from the end of another."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from typing import NoReturn

import torch.distributed as dist

from onward.errors import Interrupted, UserError, chain_of

_ECHO = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|timed out waiting|socket|process ?group",
    re.IGNORECASE,
)


def end_process(exit_code: int) -> NoReturn:
    """Ends this process now, whatever its threads wait for, after what it has printed."""
    flush = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flush.start()
    flush.join(1.0)  # a pipe that nobody reads must not keep it
    os._exit(exit_code)


def notify(text: str) -> None:
    """On the error output, in onward's name."""
    sys.stderr.write(f"onward: {text}\n")


def words(error: BaseException) -> str:
    """Of an exception: its message, or its kind."""
    with contextlib.suppress(Exception):  # one that fails to describe itself must not keep others from being reported
        return str(error) or type(error).__name__
    return type(error).__name__


def exit_code_of(error: BaseException) -> int:
    """2: the user's mistake; 3: interrupted but saved; 1: anything else."""
    return 2 if isinstance(error, UserError) else 3 if isinstance(error, Interrupted) else 1


def is_echo(error: BaseException | None) -> bool:
    """Whether an exception may only be the echo of another rank's end, or of its silence."""
    return any(
        isinstance(one, dist.DistError) or (type(one) is RuntimeError and _ECHO.search(str(one)) is not None)
        for one in chain_of(error)
    )

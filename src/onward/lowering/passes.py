"""What operators must know of their pass, beside their inputs: whether it is a repetition, and who else trains.

Only operators that keep statistics of a batch ask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)
_sum_over_replicas: Callable[[torch.Tensor], torch.Tensor] | None = None


@contextlib.contextmanager
def recomputation() -> Iterator[None]:
    """What runs inside of it was computed before: running statistics stay as they are."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def is_recomputing() -> bool:
    """Whether a forward pass is repeated for the sake of its backward pass; who compiles, compiles both ways."""
    return _recomputing.get()


def synchronize_statistics(sum_over_replicas: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """From now on batch statistics are over all replicas of this process, by a differentiable sum; None: its own.

    A setting of the process, since autograd repeats forward passes on threads of its own.
    """
    global _sum_over_replicas
    _sum_over_replicas = sum_over_replicas


def sum_over_replicas() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The sum that batch statistics are made with, where they are synchronized."""
    return _sum_over_replicas

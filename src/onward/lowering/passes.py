"""What operators must know of their pass, beside their inputs: whether it is a repetition, and who else trains.

Only operators that keep statistics of a batch ask.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token

import torch

_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)
_sum_over_replicas: Callable[[torch.Tensor], torch.Tensor] | None = None


class Recomputation:
    """A context: what runs inside of it was computed before, and running statistics stay as they are.

    It can be entered several times, since schedules that split a backward pass repeat a forward pass twice.
    """

    def __init__(self) -> None:
        self._tokens: list[Token[bool]] = []

    def __enter__(self) -> None:
        self._tokens.append(_recomputing.set(True))

    def __exit__(self, *failure: object) -> None:
        _recomputing.reset(self._tokens.pop())


def is_recomputing() -> bool:
    """Whether a forward pass is repeated for the sake of its backward pass; who compiles, compiles both ways."""
    return _recomputing.get()


# torch's compiler cannot look into context variables; so marked, it asks while it traces. The decorator that does this,
# torch.compiler.assume_constant_result, would import the whole compiler with onward.
is_recomputing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def synchronize_statistics(sum_over_replicas: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """From now on batch statistics are over all replicas of this process, by a differentiable sum; None: its own.

    A setting of the process, since autograd repeats forward passes on threads of its own.
    """
    global _sum_over_replicas
    _sum_over_replicas = sum_over_replicas


def sum_over_replicas() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The sum that batch statistics are made with, where they are synchronized."""
    return _sum_over_replicas

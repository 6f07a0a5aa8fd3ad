"""What the ranks of a group tell each other about a checkpoint, so that all of them go on or all of them fail with the
same cause. Without a group there is one rank, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from onward.errors import OnwardError

T = TypeVar("T")


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in the group and how many there are; (0, 1) without a group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def tell_all(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Every rank's value, in the order of ranks."""
    if group is None:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def do_together(group: dist.ProcessGroup | None, action: Callable[[], T]) -> list[T]:
    """Calls `action` on every rank and gives every rank all results.

    Raises:
        OnwardError: the action failed somewhere; on every rank with the class and words of the first rank that failed.
            An error that is not onward's own goes through where it arose and is an OnwardError elsewhere.
    """
    if group is None:
        return [action()]
    failure: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    told = tell_all(group, (result, None if failure is None else _words(failure)))
    if failure is not None and not isinstance(failure, OnwardError):
        raise failure
    for rank, (_, words) in enumerate(told):
        if words is not None:
            kind, text = words
            raise kind(on_rank(rank, text)) from failure
    return [value for value, _ in told]  # type: ignore[misc]


def on_rank(rank: int, text: str) -> str:
    """A message with the rank that it comes from."""
    return f"rank {rank}: {text}"


def _words(error: Exception) -> tuple[type[OnwardError], str]:
    if isinstance(error, OnwardError):
        return type(error), str(error)
    return OnwardError, f"{type(error).__name__}: {error}"

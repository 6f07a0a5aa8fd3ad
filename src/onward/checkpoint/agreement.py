"""What the ranks of a group tell each other about a checkpoint, so that all of them continue or all of them fail with
the same cause. Without a group there is one rank, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from onward import errors
from onward.errors import OnwardError
from onward.parallel.messages import Json, all_gather_json, gather_json, scatter_json

T = TypeVar("T")


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in the group and how many there are; (0, 1) without a group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def gather_from_all(group: dist.ProcessGroup | None, value: Json) -> list[Any]:
    """Every rank's value, in the order of ranks; what travels is JSON, in which tuples become lists."""
    return [value] if group is None else all_gather_json(group, value)


def do_together(group: dist.ProcessGroup | None, action: Callable[[], T]) -> T:
    """Calls `action` on every rank and returns this rank's result, if it failed on none.

    Raises:
        OnwardError: the action failed somewhere; on every rank with the class and words of the first rank that failed.
            An error that is not onward's own goes through where it arose and is an OnwardError elsewhere.
    """
    if group is None:
        return action()
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    told = gather_from_all(group, None if failure is None else _words(failure))
    if failure is not None and not isinstance(failure, OnwardError):
        raise failure
    _raise_first(told, failure)
    return result


def decide_together(
    group: dist.ProcessGroup | None, propose: Callable[[], Json], decide: Callable[[list[Any]], Sequence[Json]]
) -> Any:
    """Calls `propose` on every rank, then `decide` on the first with all proposals: it returns each rank's answer.

    Raises:
        OnwardError: either failed somewhere; on every rank with the class and words of the first rank that failed, or
            as an OnwardError where the class is not onward's own. Without a group errors go through as they are.
    """
    if group is None:
        return decide([propose()])[0]
    proposed = _outcome(propose)
    proposals = gather_json(group, proposed)
    answers: list[Json] | None = None
    if proposals is not None:
        failures = [one.get("failure") for one in proposals]
        if not any(failures):
            decided = _outcome(lambda: list(decide([one["value"] for one in proposals])))
            failures[0] = decided.get("failure")
            answers = [{"value": value} for value in decided.get("value", [])]
        if any(failures):
            answers = [{"failures": failures}] * len(proposals)
    answer = scatter_json(group, answers)
    _raise_first(answer.get("failures", []), None)
    return answer["value"]


def _outcome(action: Callable[[], Json]) -> dict[str, Any]:
    try:
        return {"value": action()}
    except Exception as error:
        return {"failure": _words(error)}


def _raise_first(failures: Sequence[Any], cause: Exception | None) -> None:
    for rank, words in enumerate(failures):
        if words is not None:
            raise _error_of(words, rank) from cause


def _error_of(words: Mapping[str, str], rank: int) -> OnwardError:
    """The error that a rank described; of a class that the tree of errors does not have, the root."""
    kind = getattr(errors, str(words["class"]), None)
    if not (isinstance(kind, type) and issubclass(kind, OnwardError)):
        kind = OnwardError
    return kind(f"rank {rank}: {words['text']}")


def _words(error: Exception) -> dict[str, str]:
    """Class and words of an error; the class is the nearest one of the tree of errors."""
    known = [one.__name__ for one in type(error).__mro__ if one.__module__ == errors.__name__]
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return {"class": known[0] if known else OnwardError.__name__, "text": text}

"""What ranks tell each other of a failure: the class and words of the first that failed."""

from __future__ import annotations

import pytest

from onward.checkpoint import agreement
from onward.checkpoint.agreement import decide_together, do_together, gather_from_all, rank_and_size
from onward.errors import OnwardError, StorageError


def fail() -> None:
    raise KeyError("x")


def test_without_a_group_nothing_is_sent_and_errors_go_through() -> None:
    assert rank_and_size(None) == (0, 1)
    assert gather_from_all(None, {"a": 1}) == [{"a": 1}]
    assert do_together(None, lambda: 3) == 3
    assert decide_together(None, lambda: 2, lambda proposals: [sum(proposals) + 1]) == 3
    with pytest.raises(KeyError):
        do_together(None, fail)
    with pytest.raises(KeyError):
        decide_together(None, lambda: 1, lambda proposals: fail())  # type: ignore[arg-type,return-value]


class OwnError(StorageError):
    """Of a class that the tree of errors does not have."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (StorageError("full"), StorageError, "rank 2: full"),
        (OwnError("full"), StorageError, "rank 2: full"),
        (ValueError("odd"), OnwardError, "rank 2: ValueError: odd"),
    ],
)
def test_an_error_of_another_rank(error: Exception, kind: type[OnwardError], text: str) -> None:
    found = agreement._error_of(agreement._words(error), 2)
    assert type(found) is kind
    assert str(found) == text


@pytest.mark.parametrize("name", ["Path", "annotations", "KeyError", "chain_of", "__name__"])
def test_a_class_that_is_no_error_of_onwards(name: str) -> None:
    assert type(agreement._error_of({"class": name, "text": "a"}, 0)) is OnwardError

"""One value of any library as an array of numbers; what holds none is refused with what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onward.data.sources.values import as_array, is_numeric, rank_of
from onward.errors import DataError


def objects(*cells: Any) -> np.ndarray:
    found = np.empty(len(cells), object)
    found[:] = cells
    return found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        ([1, 2], [1, 2]),
        ([torch.ones(2), torch.zeros(2)], [[1, 1], [0, 0]]),
        (torch.tensor([True]), [True]),
        (torch.ones(2, requires_grad=True), [1, 1]),
        (torch.tensor([1.5], dtype=torch.bfloat16), [1.5]),
        (objects([1, 2], [3, 4]), [[1, 2], [3, 4]]),
        (objects(1, 2.5), [1, 2.5]),
        ([], []),
        (objects(), []),
    ],
)
def test_numbers(value: Any, expected: Any) -> None:
    assert as_array(value, "x").astype(np.float64).tolist() == np.asarray(expected, np.float64).tolist()
    assert is_numeric(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["a", "b"], "feature 'x' holds text, not numbers; convert it before training: text to token ids, class names"),
        (objects("a", "b"), "feature 'x' holds text, not numbers"),
        (objects({"a": 1}), "feature 'x' holds dict objects, not numbers"),
        (np.array(["2026-01-01"], "datetime64[D]"), "feature 'x' holds dates, not numbers"),
        (np.array([3], "timedelta64[s]"), "feature 'x' holds durations, not numbers"),
        ([[1, 2], [3]], "feature 'x' holds rows of unequal lengths, which form no array; pad or truncate"),
        (objects([1], [1, 2]), "feature 'x' holds rows of unequal lengths"),
        (objects(1, None, None), "feature 'x' has 2 missing values of 3; fill them in or leave out these samples"),
        (torch.eye(2).to_sparse(), "feature 'x' is a sparse tensor; pass it as a dense one: tensor.to_dense()"),
    ],
)
def test_what_holds_no_numbers(value: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        as_array(value, "x")
    assert words in str(caught.value)
    assert not is_numeric(value)


@pytest.mark.parametrize(("value", "rank"), [(1, 0), ([], 1), ([[1], [2]], 2), (np.zeros((1, 2, 3)), 3), ((), 1)])
def test_axes(value: Any, rank: int) -> None:
    assert rank_of(value) == rank

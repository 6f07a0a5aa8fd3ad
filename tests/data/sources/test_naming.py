"""Which part of an item is which feature: by name, by order, renamed, or left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onward.data.sources.naming import FeatureNames
from onward.errors import DataError

NAMES = FeatureNames({"ids": 2, "mask": None}, ("label",), {"words": "ids", "row": ""})
X, M, Y = np.zeros((2, 3)), np.ones((2, 3)), np.zeros(2)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"words": X, "row": Y, "label": Y}, {"ids": X, "label": Y}),
        ((X, M, Y), {"ids": X, "mask": M, "label": Y}),
        ([(X, M), Y], {"ids": X, "mask": M, "label": Y}),
        (({"words": X, "mask": M}, Y), {"ids": X, "mask": M, "label": Y}),
        (({"words": X, "label": Y},), {"ids": X, "label": Y}),
        (X, {"ids": X}),
        ((), {}),
        ((X, [np.int64(1), np.int64(2)]), {"ids": X, "mask": [1, 2]}),
        ((X, [1, 2]), {"ids": X, "mask": [1, 2]}),
    ],
)
def test_items(item: Any, expected: dict[str, Any]) -> None:
    found = NAMES.of_item(item)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_more_parts_than_names() -> None:
    with pytest.raises(DataError, match=r"4 parts, but names for 3: 'ids', 'mask', 'label' \(the inputs of the model"):
        NAMES.of_item((X, M, Y, Y))
    with pytest.raises(DataError, match="1 parts, but names for 0: none"):
        NAMES.of_item(({"words": X, "label": Y}, Y))


@pytest.mark.parametrize(("item", "is_batch"), [((X,), True), ((X[0],), False), ((X[None],), None), ((), None)])
def test_batches_are_known_by_the_rank_of_inputs(item: Any, is_batch: bool | None) -> None:
    assert NAMES.is_batch(item) is is_batch


def test_what_holds_no_numbers_is_left_out_unless_it_is_read() -> None:
    left_out: set[str] = set()
    assert set(NAMES.arrays({"ids": X, "text": ["a"], "more": [1]}, left_out)) == {"ids", "more"}
    assert left_out == {"text"}
    with pytest.raises(DataError, match="feature 'label' holds text"):
        NAMES.arrays({"label": ["a"]})

"""Iterables of batches or samples: which they are, how many, and what ends too early or does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onward.data.batches import DataCursor
from onward.data.sources.iterated import IteratedDataLoader
from onward.data.sources.naming import FeatureNames
from onward.errors import DataError

NAMES = FeatureNames({"x": 2})


def batch(size: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((size, 3)), np.arange(first, first + size)


def test_batches_and_samples_are_told_by_rank() -> None:
    batches = IteratedDataLoader([batch(4), batch(2, 4)], NAMES)
    assert (batches.gives_batches, batches.batch_size, batches.item_count) == (True, 4, 2)
    single = IteratedDataLoader([(np.zeros(3), 1)] * 5, NAMES)
    assert (single.gives_batches, single.batch_size, single.sample_count) == (False, None, 5)
    assert [one.sample_count for one in single.one_pass(2)] == [2, 2, 1]
    assert batches.feature_specs().keys() == {"x", "label"}


def test_how_many_samples_an_iterator_has_is_not_known() -> None:
    once = IteratedDataLoader(iter([batch(4)]), NAMES)
    assert once.is_one_shot
    assert once.item_count is None
    assert once.sample_count is None


def test_the_last_position_of_an_epoch_is_the_first_of_the_next() -> None:
    loader = IteratedDataLoader([batch(4), batch(2, 4)], NAMES)
    stream = loader.batches(1)
    cursors = [next(stream).cursor for _ in range(3)]
    assert [(one.epoch, one.sample) for one in cursors] == [(0, 4), (1, 0), (1, 4)]
    assert next(loader.batches(1, DataCursor(epoch=0, sample=4))).features["label"].tolist() == [4, 5]


def test_arrays_are_the_batchs_own() -> None:
    fixed = np.zeros((2, 3))
    fixed.flags.writeable = False
    (one,) = IteratedDataLoader([(fixed, np.zeros(2))], NAMES).one_pass(2)
    assert one.features["x"].flags.writeable


def test_data_that_end() -> None:
    loader = IteratedDataLoader(iter([batch(2), batch(2)]), NAMES)
    stream = loader.batches(2)
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(DataError, match=r"ended after 2 batches: list_iterator can be read only once. Pass a list"):
        next(stream)
    with pytest.raises(DataError, match=r"the data \(list\) are empty. Pass at least one batch or sample"):
        IteratedDataLoader([], NAMES)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (
            [{"x": np.zeros((1, 2, 3))}],
            "data hold 'x' of rank 3; the model reads 'x' of rank 2, batch",
        ),
        ([{"y": np.zeros(2)}], "hold 'y'; the model reads 'x' of rank 2. Pass input_name_map="),
        ([(np.zeros((2, 3)), np.zeros(3))], "a batch holds {'x': 2, 'label': 3} samples; expected the same number"),
        (
            [(np.zeros((0, 3)), np.zeros(0))],
            "along axis 0 of every feature. Yield batches whose features have a row for each sample",
        ),
        ([(np.zeros((2, 3)), 1)], "a batch holds {'x': 2, 'label': None} samples"),
    ],
)
def test_items_that_are_neither(items: list[Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        IteratedDataLoader(items, NAMES)
    assert words in str(caught.value)


def test_samples_of_several_shapes() -> None:
    loader = IteratedDataLoader([(np.zeros(3), 0), (np.zeros(4), 1)], NAMES)
    with pytest.raises(DataError, match="samples of one batch hold different features or shapes; pad or crop them"):
        list(loader.one_pass(2))

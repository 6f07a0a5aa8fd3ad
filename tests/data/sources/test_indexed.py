"""Samples by number: chunks, positions, shares of processes, and samples that do not fit together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onward.data.batches import DataCursor
from onward.data.sources import indexed
from onward.data.sources.indexed import IndexedDataLoader
from onward.data.sources.naming import FeatureNames
from onward.errors import DataError

NAMES = FeatureNames({"x": 2})


def samples(count: int = 10) -> list[Any]:
    return [{"x": np.full(2, number), "label": number} for number in range(count)]


def labels(loader: IndexedDataLoader, size: int = 4) -> list[int]:
    return [int(label) for batch in loader.one_pass(size) for label in batch.features["label"]]


def test_a_position_is_the_same_wherever_chunks_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "CHUNK_SAMPLES", 3)
    loader = IndexedDataLoader(samples(), NAMES, shuffle=True, seed=5)
    stream = loader.batches(4)
    seen = [next(stream) for _ in range(6)]
    for place in range(5):
        again = next(loader.batches(4, seen[place].cursor))
        assert again.features["label"].tolist() == seen[place + 1].features["label"].tolist()


def test_processes_share_the_samples_and_each_needs_one() -> None:
    parts = [labels(IndexedDataLoader(samples(5), NAMES, rank=rank, size=2)) for rank in range(2)]
    assert parts == [[0, 2, 4], [1, 3]]
    with pytest.raises(DataError, match="the data hold 1 samples, too few for 2 processes to read one each"):
        IndexedDataLoader(samples(1), NAMES, rank=1, size=2)
    with pytest.raises(DataError, match="the data hold 0 samples"):
        IndexedDataLoader([], NAMES)


def test_a_split_divides_the_samples() -> None:
    kept, held = IndexedDataLoader(samples(), NAMES).split(0.3, 1)
    assert (kept.sample_count, held.sample_count) == (7, 3)
    assert sorted(labels(kept) + labels(held)) == list(range(10))
    assert labels(kept) == sorted(labels(kept))


def test_a_position_behind_the_end() -> None:
    with pytest.raises(DataError, match=r"data position is sample 11 of epoch 2, but there are 10 samples: the data"):
        IndexedDataLoader(samples(), NAMES).batches(2, DataCursor(epoch=2, sample=11))


def test_samples_that_do_not_fit_together() -> None:
    other = [*samples(2), {"x": np.zeros(2)}]
    with pytest.raises(DataError, match=r"different features: x, label and, 2 later, x. Give every sample the same"):
        labels(IndexedDataLoader(other, NAMES))
    longer = [*samples(2), {"x": np.zeros(3), "label": 1}]
    with pytest.raises(DataError, match=r"samples of feature 'x' have shapes \[2\] and \[3\]; pad or crop them to one"):
        labels(IndexedDataLoader(longer, NAMES))


def test_features_without_numbers_are_reported_once() -> None:
    loader = IndexedDataLoader([{**one, "name": "a"} for one in samples(3)], NAMES)
    assert {name: spec.shape for name, spec in loader.feature_specs().items()} == {"x": (2,), "label": ()}
    loader.feature_specs()
    assert loader.messages == ["features without numbers are left out: name."]

"""Batches from anything with a length and samples by number: torch's and Hugging Face's data sets, lists of samples."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onward.data.batches import (
    START,
    Batch,
    DataCursor,
    LastBatch,
    SampleBlock,
    describe_features,
)
from onward.data.epoch_order import EpochOrder
from onward.data.in_memory import SampleLoader, draw_held_out
from onward.data.shard import FeatureSpec
from onward.data.sources.naming import FeatureNames
from onward.errors import DataError

CHUNK_SAMPLES = 256
"""Samples fetched at a time: enough to read columns at once, few enough to wait little for the first."""


class IndexedDataLoader(SampleLoader):
    """Batches from samples that can be asked for by number, fetched as they are needed.

    Args:
        items: has `len()` and `items[i]`; a Hugging Face data set is asked for many at a time.
        names: which part of an item is which feature.
        shuffle, seed, last_batch: as in `DataLoader`.
        rank, size: of the data-parallel group: this loader reads the samples i with i mod size == rank.

    Raises:
        DataError: there are no samples for this rank.
    """

    def __init__(
        self,
        items: Any,
        names: FeatureNames,
        *,
        shuffle: bool = False,
        seed: int = 0,
        last_batch: LastBatch = "wrap",
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self._items = items
        self._own = np.arange(rank, len(items), size)
        if not len(self._own):
            raise DataError(f"the data hold {len(items)} samples, too few for {size} processes to read one each.")
        super().__init__(len(self._own), shuffle, seed, last_batch)
        self._names = names

    def split(self, fraction: float, seed: int) -> tuple[IndexedDataLoader, IndexedDataLoader]:
        """Two loaders: of the samples that stay, and of the share that is drawn from them, in their order.

        Raises:
            DataError: one of the two would be empty.
        """
        held = draw_held_out(self.sample_count, fraction, seed)
        parts = copy.copy(self), copy.copy(self)
        for part, chosen in zip(parts, (~held, held), strict=True):
            part._own = self._own[chosen]
            part.sample_count = len(part._own)
            part.messages = list(self.messages)
        return parts

    def feature_specs(self) -> dict[str, FeatureSpec]:
        """Model input name -> shape and dtype of the first sample."""
        left_out: set[str] = set()
        specs = describe_features(self._fetch(self._own[:1], left_out))
        if left_out and not self.messages:
            self.messages.append(f"features without numbers are left out: {', '.join(sorted(left_out))}.")
        return specs

    def batches(self, batch_size: int, cursor: DataCursor = START) -> Iterator[Batch]:
        """As any `SampleLoader`."""
        batches = super().batches(batch_size, cursor)
        # Where chunks begin depends on the position itself, and is no part of it.
        return (replace(one, cursor=DataCursor(epoch=one.cursor.epoch, sample=one.cursor.sample)) for one in batches)

    def _blocks(
        self, order: EpochOrder, cursor: DataCursor, epochs: int | None = None
    ) -> Generator[SampleBlock, None, None]:
        epoch, first = cursor.epoch, cursor.sample
        end = None if epochs is None else epoch + epochs
        while epoch != end:
            drawn = order.samples(epoch, 0, self.sample_count)
            numbers = self._own if drawn is None else self._own[drawn]
            for begin in range(first, self.sample_count, CHUNK_SAMPLES):
                chosen = numbers[begin : begin + CHUNK_SAMPLES]
                is_last = begin + len(chosen) == self.sample_count
                features = self._fetch(chosen)
                yield SampleBlock(
                    features=features,
                    count=len(chosen),
                    order=None,
                    first=0,
                    epoch=epoch,
                    sample=begin,
                    file=0,
                    file_count=1 if is_last else 2,
                    path="data set",
                    fingerprint="",
                )
            epoch, first = epoch + 1, 0

    def _fetch(self, numbers: np.ndarray, left_out: set[str] | None = None) -> dict[str, np.ndarray]:
        """Samples by their numbers, stacked."""
        if hasattr(self._items, "with_format"):
            columns = self._items.with_format("numpy")[numbers.tolist()]
            return self._names.arrays(self._names.of_item(columns), left_out)
        samples = [self._names.of_item(self._items[int(number)]) for number in numbers]
        _check_same_names(samples)
        arrays = [self._names.arrays(sample, left_out) for sample in samples]
        return {name: _stack([one[name] for one in arrays], name) for name in arrays[0]}


def _check_same_names(samples: Sequence[dict[str, Any]]) -> None:
    for number, sample in enumerate(samples):
        if sample.keys() != samples[0].keys():
            raise DataError(
                f"samples hold different features: {', '.join(samples[0])} and, {number} later, "
                f"{', '.join(sample)}. Give every sample the same features."
            )


def _stack(arrays: Sequence[np.ndarray], name: str) -> np.ndarray:
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise DataError(
            f"samples of feature {name!r} have shapes {list(shapes[0])} and {list(shapes[-1])}; pad or crop them to "
            "one shape, or pass a torch DataLoader whose collate_fn pads each batch."
        )
    return np.stack(arrays)

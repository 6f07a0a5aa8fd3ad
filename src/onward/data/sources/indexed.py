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
    check_batch_size,
    check_last_batch,
    cut_batches,
    describe_features,
)
from onward.data.epoch_order import EpochOrder
from onward.data.in_memory import draw_held_out
from onward.data.shard import FeatureSpec
from onward.data.sources.naming import FeatureNames
from onward.errors import DataError

CHUNK_SAMPLES = 256
"""Samples fetched at a time: enough to read columns at once, few enough to wait little for the first."""


class IndexedDataLoader:
    """Batches from samples that can be asked for by number, fetched as they are needed.

    Args:
        items: has `len()` and `items[i]`; a Hugging Face data set is asked for many at a time.
        names: which part of an item is which feature.
        shuffle, seed, last_batch: as in `DataLoader`.
        rank, size: of the data-parallel group: this loader reads the samples i with i mod size == rank.

    Attributes:
        messages, dropped_samples: as in `DataLoader`.
        sample_count: samples of an epoch of this rank.

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
        check_last_batch(last_batch)
        self._items = items
        self._own = np.arange(rank, len(items), size)
        if not len(self._own):
            raise DataError(f"the data hold {len(items)} samples, too few for {size} processes to read one each.")
        self.messages: list[str] = []
        self.dropped_samples = 0
        self.sample_count = len(self._own)
        self._names = names
        self._order = EpochOrder(shuffle, seed)
        self._last_batch: LastBatch = last_batch

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
        """Batches for training, from `cursor` on, without end; see `DataLoader.batches`.

        Raises:
            ParametersError: `batch_size` is not a positive integer.
            DataError: `cursor` is outside of the data; a batch is larger than an epoch and may not wrap.
        """
        check_batch_size(batch_size)
        if cursor.sample > self.sample_count:
            raise DataError(
                f"the data position is sample {cursor.sample} of epoch {cursor.epoch}, but there are "
                f"{self.sample_count} samples: the data changed. Restore the data, or start a new run."
            )
        batches = cut_batches(self._blocks(self._order, cursor), batch_size, self._last_batch, self._count_dropped)
        # Where chunks begin depends on the position itself, and is no part of it.
        return (replace(one, cursor=DataCursor(epoch=one.cursor.epoch, sample=one.cursor.sample)) for one in batches)

    def one_pass(self, batch_size: int) -> Iterator[Batch]:
        """Batches for evaluation: every sample once, unshuffled, the last batch as short as it comes."""
        check_batch_size(batch_size)
        blocks = self._blocks(EpochOrder(False, 0), START, epochs=1)
        return cut_batches(blocks, batch_size, "short", self._count_dropped)

    def close(self) -> None:
        """Does nothing: there is no background work."""

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

    def _count_dropped(self, samples: int) -> None:
        self.dropped_samples += samples


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


__all__ = ["IndexedDataLoader"]

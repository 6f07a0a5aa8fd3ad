"""Batches from arrays in memory: data that a program already holds, and synthetic data for measuring speed."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

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
from onward.data.prefetch import Prefetch, run_ahead
from onward.data.shard import FeatureSpec
from onward.errors import DataError, ParametersError


class SampleLoader:
    """Batches of samples that have numbers, with the interface of `DataLoader`; `_blocks` gives the samples of epochs.

    Attributes:
        messages, dropped_samples: as in `DataLoader`.
        sample_count: samples of an epoch of this rank.
    """

    def __init__(self, sample_count: int, shuffle: bool, seed: int, last_batch: LastBatch) -> None:
        check_last_batch(last_batch)
        self.messages: list[str] = []
        self.dropped_samples = 0
        self.sample_count = sample_count
        self._order = EpochOrder(shuffle, seed)
        self._last_batch: LastBatch = last_batch

    def batches(self, batch_size: int, cursor: DataCursor = START) -> Iterator[Batch]:
        """Batches for training, from `cursor` on, without end; see `DataLoader.batches`.

        Raises:
            ParametersError: `batch_size` is not a positive integer.
            DataError: `cursor` is outside of the data; a batch is larger than an epoch and may not wrap.
        """
        check_batch_size(batch_size)
        if cursor.sample > self.sample_count or cursor.file:
            raise DataError(
                f"the data position is sample {cursor.sample} of epoch {cursor.epoch}, but there are "
                f"{self.sample_count} samples: the data changed. Restore the data, or start a new run."
            )
        return cut_batches(self._blocks(self._order, cursor), batch_size, self._last_batch, self._count_dropped)

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
        raise NotImplementedError

    def _count_dropped(self, samples: int) -> None:
        self.dropped_samples += samples


class InMemoryDataLoader(SampleLoader):
    """Batches from arrays, with the interface of `DataLoader`.

    Args:
        features: model input name -> array [samples, *sample shape]; all with the same number of samples, at least 1.
        shuffle, seed, last_batch: as in `DataLoader`; here an epoch's order covers all samples.

    Raises:
        DataError: no features, no samples, or arrays of unequal length.
        ParametersError: an argument that makes no sense.
    """

    def __init__(
        self,
        features: Mapping[str, np.ndarray],
        *,
        shuffle: bool = False,
        seed: int = 0,
        last_batch: LastBatch = "wrap",
    ) -> None:
        arrays = {name: np.asarray(array) for name, array in features.items()}
        lengths = {name: array.shape[0] if array.ndim else None for name, array in arrays.items()}
        if not arrays or len(set(lengths.values())) != 1 or next(iter(lengths.values())) in (0, None):
            raise DataError(
                f"features with sample counts {lengths}; expected at least one feature, and the same number of samples "
                "(at least 1) along axis 0 of each."
            )
        super().__init__(int(next(iter(arrays.values())).shape[0]), shuffle, seed, last_batch)
        self._features = arrays
        self._open: weakref.WeakSet[Prefetch[Any, Any]] = weakref.WeakSet()

    def split(self, fraction: float, seed: int) -> tuple[InMemoryDataLoader, InMemoryDataLoader]:
        """Two loaders: of the samples that stay, and of the share that is drawn from them, in their order.

        Raises:
            DataError: one of the two would be empty.
        """
        held = draw_held_out(self.sample_count, fraction, seed)
        parts = []
        for chosen in (~held, held):
            features = {name: array[chosen] for name, array in self._features.items()}
            part = InMemoryDataLoader(
                features, shuffle=self._order.shuffle, seed=self._order.seed, last_batch=self._last_batch
            )
            part.messages += self.messages
            parts.append(part)
        return parts[0], parts[1]

    def feature_specs(self) -> dict[str, FeatureSpec]:
        """Model input name -> shape and dtype of one sample."""
        return describe_features(self._features)

    def batches(self, batch_size: int, cursor: DataCursor = START) -> Iterator[Batch]:
        """As any `SampleLoader`; large ones are assembled in the background, before they are asked for.

        What is changed in the arrays meanwhile may show only later, and samples that are dropped count sooner.
        """
        return run_ahead(super().batches(batch_size, cursor), self._open)

    def one_pass(self, batch_size: int) -> Iterator[Batch]:
        """As any `SampleLoader`; large ones are assembled in the background."""
        return run_ahead(super().one_pass(batch_size), self._open)

    def close(self) -> None:
        """Stops the background work; iterators still open raise when asked for more."""
        for prefetch in list(self._open):
            prefetch.close()

    def _blocks(
        self, order: EpochOrder, cursor: DataCursor, epochs: int | None = None
    ) -> Generator[SampleBlock, None, None]:
        epoch, first = cursor.epoch, cursor.sample
        if first == self.sample_count:
            epoch, first = epoch + 1, 0
        end = None if epochs is None else epoch + epochs
        while epoch != end:
            permutation = order.samples(epoch, 0, self.sample_count)
            yield SampleBlock(
                features=self._features,
                count=self.sample_count,
                order=permutation,
                first=first,
                epoch=epoch,
                sample=0,
                file=0,
                file_count=1,
                path="memory",
                fingerprint="",
            )
            epoch, first = epoch + 1, 0


def draw_held_out(count: int, fraction: float, seed: int) -> np.ndarray:
    """Which of `count` samples are held out: a boolean for each, drawn by seed.

    Raises:
        ParametersError: the fraction is not between 0 and 1.
        DataError: none would be held out, or all.
    """
    if not 0 < fraction < 1:
        raise ParametersError(f"validation_fraction is {fraction!r}; expected a number above 0 and below 1.")
    number = round(count * fraction)
    if not 0 < number < count:
        raise DataError(
            f"validation_fraction is {fraction:g}, which of {count} samples leaves {count - number} for training and "
            f"{number} for evaluation; expected at least 1 of each. Pass another fraction, or validation_data."
        )
    order = EpochOrder(True, seed).samples(0, 1, count)
    assert order is not None
    held = np.zeros(count, bool)
    held[order[:number]] = True
    return held


@dataclass(frozen=True)
class SyntheticFeature:
    """A feature of synthetic data: shape of one sample, dtype, and the half-open range of its values."""

    shape: tuple[int, ...]
    dtype: DTypeLike = np.float32
    low: float = 0
    high: float = 1


def make_synthetic_loader(
    features: Mapping[str, SyntheticFeature], sample_count: int, *, seed: int = 0
) -> InMemoryDataLoader:
    """Uniformly random data, for measuring speed without a data set.

    Args:
        features: model input name -> what to draw; whole numbers for integer and boolean dtypes.
        sample_count: samples, at least 1; an epoch reads each once.
        seed: the same seed gives the same data.

    Raises:
        ParametersError: no samples, or an empty range.
    """
    if sample_count < 1:
        raise ParametersError(f"sample_count is {sample_count}; expected at least 1.")
    random = np.random.Generator(np.random.PCG64(seed))
    arrays: dict[str, np.ndarray] = {}
    for name, feature in features.items():
        if not feature.low < feature.high:
            raise ParametersError(f"feature {name!r}: the range [{feature.low}, {feature.high}) is empty.")
        shape = (sample_count, *feature.shape)
        dtype = np.dtype(feature.dtype)
        if dtype.kind in "iub":
            arrays[name] = random.integers(int(feature.low), int(np.ceil(feature.high)), shape).astype(dtype)
        else:
            drawn = random.random(shape, np.float32) * np.float32(feature.high - feature.low) + np.float32(feature.low)
            arrays[name] = drawn.astype(dtype)
    return InMemoryDataLoader(arrays)

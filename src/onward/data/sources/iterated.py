"""Batches from what can only be iterated: torch's DataLoader, and other iterables of batches or samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np

from onward.data.batches import START, Batch, DataCursor, check_batch_size, describe_features
from onward.data.shard import FeatureSpec
from onward.data.sources.naming import FeatureNames
from onward.errors import DataError


class IteratedDataLoader:
    """Batches as an iterable gives them, or put together from its samples.

    Batches are used as they come, whatever `batch_size` says; whoever made them decides on shuffling and on which
    process reads what. A position is found again by reading past the samples before it.

    Args:
        items: gives batches or samples; iterated again for every epoch.
        names: which part of an item is which feature.

    Attributes:
        messages, dropped_samples: as in `DataLoader`.
        gives_batches: whether items are batches.
        batch_size: of the first batch; None where items are samples.
        is_one_shot: whether it can be iterated once only.

    Raises:
        DataError: there are no items, or it is unclear whether they are batches.
    """

    def __init__(self, items: Iterable[Any], names: FeatureNames) -> None:
        self._items = items
        self._names = names
        self.messages: list[str] = []
        self.dropped_samples = 0
        self.is_one_shot = iter(items) is items
        self._begun: Iterator[Any] | None = None
        first = self._peek()
        self._first = names.of_item(first)
        self.gives_batches = self._are_batches(first)
        left_out: set[str] = set()
        arrays = names.arrays(self._first, left_out)
        self.batch_size = _sample_count(arrays) if self.gives_batches else None
        self._specs = describe_features(arrays if self.gives_batches else _stack([arrays]))
        if left_out:
            self.messages.append(f"features without numbers are left out: {', '.join(sorted(left_out))}.")

    @property
    def item_count(self) -> int | None:
        """Batches or samples of an epoch, where the iterable knows them."""
        try:
            return len(self._items)  # type: ignore[arg-type]
        except TypeError:
            return None

    @property
    def sample_count(self) -> int | None:
        """Samples of an epoch, where they are known: of a torch DataLoader with a plain data set, or of samples."""
        if not self.gives_batches:
            return self.item_count
        count, is_plain = self.item_count, getattr(self._items, "batch_size", None) == self.batch_size
        if count is None or self.batch_size is None or not is_plain:
            return None
        samples = count * self.batch_size
        if getattr(self._items, "drop_last", False):
            return samples
        try:
            return min(samples, len(self._items.sampler))  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            return samples

    def feature_specs(self) -> dict[str, FeatureSpec]:
        """Model input name -> shape and dtype of a sample of the first item."""
        return self._specs

    def batches(self, batch_size: int, cursor: DataCursor = START) -> Iterator[Batch]:
        """Batches for training, from `cursor` on, epoch after epoch; see `DataLoader.batches`.

        Raises:
            ParametersError: `batch_size` is not a positive integer.
            DataError: the iterable gives nothing more, or what does not fit.
        """
        check_batch_size(batch_size)
        epoch, passed = cursor.epoch, cursor.sample
        while True:
            count = 0
            for batch in self._epoch(epoch, batch_size, passed):
                count += 1
                yield batch
            if self.is_one_shot:
                raise DataError(
                    f"the training data ended after {count} batches: {type(self._items).__name__} can be read only "
                    "once. Pass a list or a DataLoader, which can be read again, or train fewer steps."
                )
            if not count and not passed:
                raise DataError(f"the training data have no batch in epoch {epoch}; pass at least one.")
            epoch, passed = epoch + 1, 0

    def one_pass(self, batch_size: int) -> Iterator[Batch]:
        """Batches for evaluation: everything once, the last batch as short as it comes."""
        check_batch_size(batch_size)
        return self._epoch(0, batch_size, 0)

    def close(self) -> None:
        """Lets an iterator that was begun go."""
        self._begun = None

    # ------------------------------------------------------------------------------------------------------ internals

    def _peek(self) -> Any:
        iterator = iter(self._items)
        try:
            first = next(iterator)
        except StopIteration:
            raise DataError(
                f"the data ({type(self._items).__name__}) are empty. Pass at least one batch or sample."
            ) from None
        if self.is_one_shot:
            self._begun = chain([first], iterator)
        return first

    def _are_batches(self, first: Any) -> bool:
        if getattr(self._items, "batch_sampler", None) is not None:
            return True
        found = self._names.is_batch(first)
        if found is None:
            ranks = {
                name: np.ndim(value) for name, value in self._names.of_item(first).items() if name in self._names.all
            }
            wanted = ", ".join(f"{name!r} of rank {rank or '?'}" for name, rank in self._names.inputs.items())
            raise DataError(
                f"the items of the data hold {', '.join(f'{name!r} of rank {rank}' for name, rank in ranks.items())}; "
                f"the model reads {wanted}, batch axis included. Pass batches, or samples without the batch axis."
                if ranks
                else f"the items of the data hold {', '.join(map(repr, self._first))}; the model reads {wanted}. Pass "
                "input_name_map={'name in the data': 'name in the model'}."
            )
        return found

    def _epoch(self, epoch: int, batch_size: int, passed: int) -> Iterator[Batch]:
        """The batches of an epoch after `passed` of its samples; the cursor after the last is the next epoch's."""
        previous: Batch | None = None
        sample = 0
        for features in self._arrays(batch_size):
            count = _sample_count(features)
            sample += count
            if sample <= passed:
                continue
            if previous is not None:
                yield previous
            previous = Batch(
                features=features, cursor=DataCursor(epoch=epoch, sample=sample), sample_count=count, epoch=epoch
            )
        if previous is not None:
            yield replace(previous, cursor=DataCursor(epoch=epoch + 1, sample=0))

    def _arrays(self, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        begun, self._begun = self._begun, None
        items = iter(self._items) if begun is None else begun
        named = (self._names.arrays(self._names.of_item(item)) for item in items)
        if self.gives_batches:
            # Tensors are made over this memory: it must be whoever takes the batch's own.
            for features in named:
                yield {name: np.require(array, requirements=["C", "W"]) for name, array in features.items()}
            return
        while samples := list(islice(named, batch_size)):
            yield _stack(samples)


def _stack(samples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    try:
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    except (ValueError, KeyError) as error:
        raise DataError(
            "samples of one batch hold different features or shapes; pad or crop them to one shape, or pass batches."
        ) from error


def _sample_count(features: dict[str, np.ndarray]) -> int:
    counts = {name: array.shape[0] if array.ndim else None for name, array in features.items()}
    if len(set(counts.values())) != 1 or None in counts.values() or 0 in counts.values():
        raise DataError(
            f"a batch holds {counts} samples; expected the same number, at least 1, along axis 0 of every feature. "
            "Yield batches whose features have a row for each sample, or yield single samples and pass batch_size."
        )
    return int(next(iter(features.values())).shape[0])

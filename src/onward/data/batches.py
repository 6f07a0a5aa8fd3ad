"""What training and evaluation get from data: batches, the position after each of them, and who hands them out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from onward.data.shard import FeatureSpec
from onward.errors import CheckpointError, DataError, ParametersError

LastBatch = Literal["wrap", "drop", "short"]
"""What happens to the samples at an epoch's end that do not fill a batch.

- ``wrap``: the batch is completed with the first samples of the next epoch. Every batch is full, every epoch reads
  every sample exactly once, nothing is lost; a batch may span two epochs (or more, where it is larger than an epoch).
- ``drop``: they are left out of this epoch and counted in `dropped_samples`. Every batch is full; a batch larger than
  an epoch is an error, since nothing would ever be read.
- ``short``: they make a smaller batch. Nothing is lost, but one batch of each epoch has another size.
"""


@dataclass(frozen=True, kw_only=True)
class DataCursor:
    """A position between two samples; the next sample read is the one after it.

    Attributes:
        epoch: passes over the data finished before.
        sample: samples of this epoch read before.
        file: position, in this epoch's order of files, of the file that holds the next sample; None: to be found from
            `sample`, through the files' indexes.
        file_sample: samples of that file read before, in this epoch's order of its samples.
        fingerprint: of files, partition and shuffling that the position belongs to; empty: unknown.
    """

    epoch: int = 0
    sample: int = 0
    file: int | None = None
    file_sample: int = 0
    fingerprint: str = ""

    def to_dict(self) -> dict[str, int | str | None]:
        """A JSON-able form, for checkpoints."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataCursor:
        """The inverse of `to_dict`.

        Raises:
            CheckpointError: a field is unknown, missing or of the wrong type.
        """
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            raise CheckpointError(f"a data cursor has the fields {sorted(known)}, not {sorted(values)}.")
        cursor = cls(**values)
        counts = (cursor.epoch, cursor.sample, cursor.file_sample, 0 if cursor.file is None else cursor.file)
        if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(cursor.fingerprint, str):
            raise CheckpointError(f"a data cursor's fields are counts from 0, not {dict(values)}.")
        return cursor


def resumed_cursor(record: Mapping[str, Any], replica: int, replicas: int) -> tuple[DataCursor, list[str]]:
    """Where a replica continues in its data, by the record of a checkpoint, and what to report to the user.

    With as many replicas as before it is the exact sample. With another number every replica has other files: the
    epoch continues, and as many of its samples are passed over as all replicas together had read.
    """
    cursors = {entry["data"]: DataCursor.from_dict(entry["cursor"]) for entry in record.get("ranks", {}).values()}
    if not cursors:
        cursors = {0: DataCursor.from_dict(record["cursor"])}
    if len(cursors) == replicas:
        return cursors[replica], []
    epoch = min(cursor.epoch for cursor in cursors.values())
    read = sum(cursor.sample for cursor in cursors.values() if cursor.epoch == epoch)
    note = (
        f"the checkpoint is of {len(cursors)} replicas, this run has {replicas}: the data are redistributed, and "
        f"epoch {epoch} goes on after {read} samples; some of its samples may be read twice, others not at all."
    )
    return DataCursor(epoch=epoch, sample=read // replicas), [note]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples for one step.

    Attributes:
        features: model input name -> array [sample_count, *sample shape], owned by whoever takes the batch.
        cursor: the position after this batch.
        sample_count: samples in it.
        epoch: passes over the data finished before its first sample.
        origin: where the samples come from, (file, number of each sample in it); empty where that is unknown.
    """

    features: dict[str, np.ndarray]
    cursor: DataCursor
    sample_count: int
    epoch: int
    origin: tuple[tuple[Path | str, Sequence[int] | np.ndarray], ...] = ()


Origin = Sequence[tuple[Path | str, Sequence[int] | np.ndarray]]
"""As `Batch.origin`."""


def origin_of(origin: Origin, row: int) -> str:
    """Where a sample of a batch comes from, in words; "" where that is unknown."""
    for path, numbers in origin:
        if row < len(numbers):
            return f"sample {int(numbers[row])} of {path if isinstance(path, Path) else f'the data in {path}'}"
        row -= len(numbers)
    return ""


START = DataCursor()
"""The first sample of the first epoch."""


class BatchSource(Protocol):
    """What a runner needs of training or test data."""

    def batches(self, batch_size: int, cursor: DataCursor = START) -> Iterator[Batch]:
        """Batches for training from `cursor` on, epoch after epoch, without end."""

    def one_pass(self, batch_size: int) -> Iterator[Batch]:
        """Batches for evaluation: every sample once, unshuffled, the last batch as short as it comes."""

    def feature_specs(self) -> dict[str, FeatureSpec]:
        """Model input name -> shape and dtype of one sample."""

    def close(self) -> None:
        """Stops background work; iterators still open end with an error."""


class RowSource(Protocol):
    """Samples that are read one by one when a batch takes them."""

    @property
    def specs(self) -> Mapping[str, FeatureSpec]:
        """Model input name -> shape and dtype of one sample."""

    def read(self, numbers: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Fills `out`, name -> array [samples, *sample shape], with the samples of these numbers."""


@dataclass(frozen=True, kw_only=True)
class SampleBlock:
    """Samples of one file, in the order in which they are to be read.

    Attributes:
        features: name -> array over the file's samples; or what reads them.
        count: samples in the file.
        order: permutation of them; None: in their own order.
        first: how many of them, in that order, were read before.
        epoch, sample, file: as in `DataCursor`, at the file's first sample.
        file_count: files of the epoch.
        path: where the samples come from, for messages.
        fingerprint: for cursors.
    """

    features: Mapping[str, np.ndarray] | RowSource
    count: int
    order: np.ndarray | None
    first: int
    epoch: int
    sample: int
    file: int
    file_count: int
    path: Path | str
    fingerprint: str

    @property
    def specs(self) -> Mapping[str, FeatureSpec]:
        """Shape and dtype of one sample of each feature."""
        return describe_features(self.features) if isinstance(self.features, Mapping) else self.features.specs

    def cursor_after(self, position: int) -> DataCursor:
        """The cursor after `position` samples of this block's file."""
        if position < self.count:
            return DataCursor(
                epoch=self.epoch,
                sample=self.sample + position,
                file=self.file,
                file_sample=position,
                fingerprint=self.fingerprint,
            )
        if self.file + 1 < self.file_count:
            return DataCursor(
                epoch=self.epoch,
                sample=self.sample + position,
                file=self.file + 1,
                file_sample=0,
                fingerprint=self.fingerprint,
            )
        return DataCursor(epoch=self.epoch + 1, sample=0, file=0, file_sample=0, fingerprint=self.fingerprint)


def check_batch_size(batch_size: int) -> None:
    """Raises ParametersError unless it is a positive integer."""
    if type(batch_size) is not int or batch_size < 1:
        raise ParametersError(f"batch_size is {batch_size!r}; expected an integer of at least 1.")


def check_last_batch(last_batch: str) -> None:
    """Raises ParametersError for an unknown policy."""
    if last_batch not in get_args(LastBatch):
        raise ParametersError(f"last_batch is {last_batch!r}; expected one of {', '.join(get_args(LastBatch))}.")


def cut_batches(
    blocks: Generator[SampleBlock, None, None],
    batch_size: int,
    last_batch: LastBatch,
    count_dropped: Callable[[int], None],
) -> Iterator[Batch]:
    """Cuts a stream of files into batches, over file ends; see `LastBatch` for epoch ends.

    Holds no reference to a block while it asks for the next, so that its memory can be given back.

    Raises:
        DataError: files differ in features, shapes or dtypes, or an epoch is smaller than a batch that may not wrap.
    """
    with closing(blocks):
        yield from _cut(blocks, batch_size, last_batch, count_dropped)


def _cut(
    blocks: Iterator[SampleBlock], batch_size: int, last_batch: LastBatch, count_dropped: Callable[[int], None]
) -> Iterator[Batch]:
    out: dict[str, np.ndarray] = {}
    filled, batch_epoch, epoch, epoch_samples = 0, 0, 0, 0
    origin: list[tuple[Path | str, Sequence[int] | np.ndarray]] = []
    cursor = DataCursor()
    specs: Mapping[str, FeatureSpec] = {}
    specs_path: Path | str = ""
    while (block := next(blocks, None)) is not None:
        if filled and block.epoch != epoch and last_batch != "wrap":
            if last_batch == "short":
                yield _make_batch(out, filled, cursor, batch_epoch, origin)
            elif epoch_samples < batch_size:
                raise _too_small(epoch_samples, batch_size)
            else:
                count_dropped(filled)
            filled = 0
        epoch = block.epoch
        epoch_samples = block.sample + block.count
        if not specs:
            specs, specs_path = block.specs, block.path
        _check_like(block, specs, specs_path)
        position = block.first
        while position < block.count:
            if filled == 0:
                origin = []
                out = {name: np.empty((batch_size, *spec.shape), spec.dtype) for name, spec in specs.items()}
                batch_epoch = epoch
            take = min(batch_size - filled, block.count - position)
            _copy(block, position, take, out, filled)
            rows = range(position, position + take)
            origin.append((block.path, rows if block.order is None else block.order[position : position + take]))
            filled += take
            position += take
            cursor = block.cursor_after(position)
            if filled == batch_size:
                filled = 0
                yield _make_batch(out, batch_size, cursor, batch_epoch, origin)
                out = {}
        block = None
    if filled:
        yield _make_batch(out, filled, cursor, batch_epoch, origin)


def describe_features(features: Mapping[str, np.ndarray]) -> dict[str, FeatureSpec]:
    """Shape and dtype of one sample of each stacked feature."""
    return {name: FeatureSpec(array.shape[1:], array.dtype) for name, array in features.items()}


def _make_batch(
    out: dict[str, np.ndarray],
    count: int,
    cursor: DataCursor,
    epoch: int,
    origin: Sequence[tuple[Path | str, Sequence[int] | np.ndarray]],
) -> Batch:
    return Batch(
        features={name: array[:count] for name, array in out.items()},
        cursor=cursor,
        sample_count=count,
        epoch=epoch,
        origin=tuple(origin),
    )


def _copy(block: SampleBlock, position: int, count: int, out: Mapping[str, np.ndarray], filled: int) -> None:
    rows = slice(position, position + count)
    if not isinstance(block.features, Mapping):
        numbers = np.arange(position, position + count) if block.order is None else block.order[rows]
        block.features.read(numbers, {name: array[filled : filled + count] for name, array in out.items()})
        return
    for name, array in block.features.items():
        target = out[name][filled : filled + count]
        if block.order is None:
            target[...] = array[rows]
        else:
            # mode="clip" writes straight into the target; the default buffers it. Orders are permutations, in range.
            np.take(array, block.order[rows], axis=0, out=target, mode="clip")


def _too_small(samples: int, batch_size: int) -> DataError:
    return DataError(
        f"an epoch has only {samples} samples, fewer than batch_size {batch_size}: with last_batch 'drop' every one of "
        "them would be dropped. Lower training.batch_size, add data, or set data.last_batch to 'wrap'."
    )


def _check_like(block: SampleBlock, specs: Mapping[str, FeatureSpec], specs_path: Path | str) -> None:
    found = block.specs
    if found == specs:
        return
    for name in sorted({*found, *specs}):
        here, there = found.get(name), specs.get(name)
        if here != there:
            raise DataError(
                f"shard {str(block.path)!r}: feature {name!r} is {here or 'missing'}, but {there or 'missing'} in "
                f"{str(specs_path)!r}. All shards of a data set must hold the same features with the same shapes and "
                "dtypes: pack them again with one set of options."
            )

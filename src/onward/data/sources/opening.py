"""Any data that a Python program may hold -> a source of batches; which kind it is, is seen from what it can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onward.data.batches import START, Batch, BatchSource, DataCursor, LastBatch
from onward.data.in_memory import InMemoryDataLoader
from onward.data.loader import DataLoader
from onward.data.numbering import Numbering
from onward.data.packing.options import PackOptions
from onward.data.packing.splits import EVALUATION_NAMES, TRAINING_NAMES
from onward.data.shard import FeatureSpec
from onward.data.sources.columns import arrays_of_frame, arrays_of_parts, is_frame
from onward.data.sources.indexed import IndexedDataLoader
from onward.data.sources.iterated import IteratedDataLoader
from onward.data.sources.naming import FeatureNames
from onward.data.sources.temporary import TemporaryFolder
from onward.errors import DataError
from onward.parameters.limits import DEFAULT_LIMITS, Limits

KINDS = (
    "a dictionary of arrays, a tuple (x, y), a pandas, polars or Arrow table, a torch or Hugging Face data set, a "
    "torch DataLoader, an iterable of batches or samples, a folder or file, or an onward.DataLoader"
)


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How data are read.

    Attributes:
        shuffle, seed, last_batch: as in `DataLoader`; iterables decide themselves.
        limits: what a file may ask of the machine.
        rank, size: of the data-parallel group; each rank reads its part, but for iterables, which are each rank's own.
    """

    shuffle: bool = False
    seed: int = 0
    last_batch: LastBatch = "wrap"
    rank: int = 0
    size: int = 1
    limits: Limits = DEFAULT_LIMITS


def open_data(data: Any, names: FeatureNames, reading: ReadingOptions = ReadingOptions()) -> BatchSource:
    """A source of batches over data of any kind.

    Args:
        data: one of `KINDS`.
        names: which part of it is which feature.
        reading: how.

    Raises:
        DataError: it is of no known kind, empty, or holds no numbers.
    """
    if _is_source(data):
        return data  # type: ignore[no-any-return]
    if isinstance(data, str | Path):
        return _open_path(Path(data), names, reading)
    if is_frame(data):
        return _in_memory(*arrays_of_frame(data, names), reading)
    if isinstance(data, Mapping | tuple) or _is_array(data):
        return _in_memory(*arrays_of_parts(data, names), reading)
    if _is_indexed(data) and not _holds_batches(data, names):
        return IndexedDataLoader(
            data,
            names,
            shuffle=reading.shuffle,
            seed=reading.seed,
            last_batch=reading.last_batch,
            rank=reading.rank,
            size=reading.size,
        )
    if isinstance(data, Iterable):
        return IteratedDataLoader(data, names)
    raise DataError(f"data of type {type(data).__name__} are not supported; pass {KINDS}.")


def _is_source(data: Any) -> bool:
    return callable(getattr(data, "batches", None)) or callable(getattr(data, "one_pass", None))


def _is_array(data: Any) -> bool:
    return hasattr(data, "shape") and hasattr(data, "dtype")


def _is_indexed(data: Any) -> bool:
    """Whether samples can be asked for by number: no loader, which has a length as well."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | bytes)


def _holds_batches(data: Any, names: FeatureNames) -> bool:
    """Whether a list holds batches."""
    if not len(data):
        raise DataError(f"the data ({type(data).__name__}) are empty; pass at least one sample.")
    return isinstance(data, Sequence) and bool(names.is_batch(data[0]))


def _in_memory(arrays: Mapping[str, Any], notes: list[str], reading: ReadingOptions) -> InMemoryDataLoader:
    counts = {name: len(array) if array.ndim else None for name, array in arrays.items()}
    enough = all(count is None or count >= reading.size for count in counts.values())
    if reading.size > 1 and not enough:
        raise DataError(f"the data hold {counts} samples, too few for {reading.size} processes to read one each.")
    mine = {name: array[reading.rank :: reading.size] if array.ndim else array for name, array in arrays.items()}
    loader = InMemoryDataLoader(mine, shuffle=reading.shuffle, seed=reading.seed, last_batch=reading.last_batch)
    loader.messages += notes
    return loader


def _open_path(path: Path, names: FeatureNames, reading: ReadingOptions) -> BatchSource:
    """Shards as they are; anything else is packed into a temporary folder first."""
    folder = _folder_of_shards(path, TRAINING_NAMES)
    return PackedDataLoader(path, names, reading) if folder is None else _shards(folder, names, reading)


def holds_shards(path: Path) -> bool:
    """Whether a folder, or its folder `train`, holds packed data."""
    return _folder_of_shards(path, TRAINING_NAMES) is not None


def _folder_of_shards(path: Path, names: Sequence[str]) -> Path | None:
    """The folder of shards: the path itself, or one of these names in it; None: neither is."""
    folders = [path, *(path / name for name in names)]
    return next((folder for folder in folders if folder.is_dir() and any(folder.glob("*.pb"))), None)


def open_test_part(data: Any, source: BatchSource, names: FeatureNames) -> BatchSource | None:
    """The evaluation data of a folder that is divided into training and evaluation data; None: it is not.

    Args:
        data: as it was given to `open_data`.
        source: what `open_data` made of it.
        names: as for `open_data`.
    """
    if isinstance(source, PackedDataLoader):
        return source.test
    if not isinstance(data, str | Path) or any(Path(data).glob("*.pb")):
        return None
    folder = _folder_of_shards(Path(data), EVALUATION_NAMES)
    return None if folder is None else _shards(folder, names, ReadingOptions())


def _shards(folder: Path, names: FeatureNames, reading: ReadingOptions) -> DataLoader:
    return DataLoader(
        dict(names.renamed),
        folder,
        rank=reading.rank,
        size=reading.size,
        shuffle=reading.shuffle,
        seed=reading.seed,
        last_batch=reading.last_batch,
    )


class PackedDataLoader:
    """Batches from what `onward pack` takes, packed into a temporary folder that `close` removes.

    Args:
        path: a file or folder.
        names, reading: as for `open_data`.
        options: of packing; None: what its kind has by default.

    Attributes:
        test: batches of the evaluation data, where the folder is divided into both.
    """

    def __init__(
        self, path: Path, names: FeatureNames, reading: ReadingOptions, options: PackOptions | None = None
    ) -> None:
        self._folder = TemporaryFolder("onward-packed-")
        how = replace(options or PackOptions(samples_per_file=1024), limits=reading.limits)
        from onward.data.packing.packer import pack  # with templates of chats and readers of tables

        summary = pack(path, self._folder.path, how)
        train, *tests = summary.folders
        self._loader = _shards(train, names, reading)
        self.test = _shards(tests[0], names, ReadingOptions()) if tests else None
        self.messages = self._loader.messages
        self.messages.append(f"{str(path)!r} was packed for this run: {summary.sample_count} samples.")

    @property
    def dropped_samples(self) -> int:
        """As in `DataLoader`."""
        return self._loader.dropped_samples

    @property
    def numbering(self) -> Numbering | None:
        """As in `DataLoader`."""
        return self._loader.numbering

    @property
    def sample_count(self) -> int:
        """As in `DataLoader`."""
        return self._loader.sample_count

    def feature_specs(self) -> dict[str, FeatureSpec]:
        """As in `DataLoader`."""
        return self._loader.feature_specs()

    def batches(self, batch_size: int, cursor: DataCursor = START) -> Iterator[Batch]:
        """As in `DataLoader`."""
        return self._loader.batches(batch_size, cursor)

    def one_pass(self, batch_size: int) -> Iterator[Batch]:
        """As in `DataLoader`."""
        return self._loader.one_pass(batch_size)

    def close(self) -> None:
        """Stops reading and removes the folder."""
        self._loader.close()
        if self.test is not None:
            self.test.close()
        self._folder.remove()


__all__ = ["KINDS", "FeatureNames", "PackedDataLoader", "ReadingOptions", "open_data", "open_test_part"]

"""Shards on disk -> batches: one rank's files, read ahead in the background, in an order that a cursor resumes."""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from onward.data.batches import (
    START,
    Batch,
    DataCursor,
    LastBatch,
    SampleBlock,
    check_batch_size,
    check_last_batch,
    cut_batches,
)
from onward.data.epoch_order import EpochOrder
from onward.data.manifest import MANIFEST_NAME
from onward.data.numbering import Numbering
from onward.data.prefetch import Prefetch, run_ahead
from onward.data.shard import FeatureSpec, Shard, check_name_map, load_shard, read_feature_specs
from onward.data.shard_files import find_shard_files
from onward.data.shard_format import index_shard
from onward.data.stored_rows import Rows, open_rows
from onward.errors import DataError, ParametersError
from onward.operating_system import usable_cores
from onward.retries import persistently


class _Visit(NamedTuple):
    """One reading of one file: in which epoch, at which position of its order, and which of this rank's files."""

    epoch: int
    position: int
    file: int


class DataLoader:
    """Batches from a directory of shards.

    Args:
        input_name_map: name in the file -> model input name, or "" for a feature to leave out. Features that it does
            not list have their own names.
        data_dir: directory of `.pb` shards, read in the order of their names; hidden files and folders are left out.
        max_num_files_preload: files in memory at once, the one being read included. If all files of this rank fit,
            they stay in memory and are read from disk once.
        rank, size: of the data-parallel group: this loader reads the files i with i mod size == rank. The default
            reads all: what replicated evaluation wants.
        shuffle: redraw the order of files, and of the samples in each file, for every epoch. Samples do not move
            between files. `one_pass` never shuffles.
        seed: of the shuffling.
        last_batch: what happens to an epoch's last, incomplete batch; see `LastBatch`.
        skip_corrupt: leave broken files out, saying so in `messages`, instead of raising; all of them broken is an
            error even so.

    Attributes:
        messages: sentences for the user: files skipped, data changed since a cursor was taken, unequal partition.
        skipped_files: path -> why it was left out.
        dropped_samples: left out by last_batch "drop" since this loader was made.

    Raises:
        ParametersError: an argument that makes no sense.
        DataError: the directory is missing, holds no shards, fewer shards than ranks, or shards that contradict its
            `pack.json`.
    """

    def __init__(
        self,
        input_name_map: Mapping[str, str],
        data_dir: str | os.PathLike[str],
        max_num_files_preload: int = 2,
        rank: int = 0,
        size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        last_batch: LastBatch = "wrap",
        skip_corrupt: bool = False,
    ) -> None:
        check_name_map(input_name_map)
        if type(max_num_files_preload) is not int or max_num_files_preload < 1:
            raise ParametersError(
                f"max_num_files_preload is {max_num_files_preload!r}; expected an integer of at least 1."
            )
        check_last_batch(last_batch)
        self.messages: list[str] = []
        self.skipped_files: dict[Path, str] = {}
        self.dropped_samples = 0
        self._input_name_map = dict(input_name_map)
        self._capacity = max_num_files_preload
        self._order = EpochOrder(shuffle, seed)
        self._last_batch: LastBatch = last_batch
        self._skip_corrupt = skip_corrupt
        folder = Path(data_dir)
        self._files = persistently(lambda: find_shard_files(folder, rank, size), f"listing {folder}")
        self._sample_counts: dict[int, int] = {}
        self._resident: dict[int, Shard] = {}
        self._has_rows: dict[int, bool] = {}
        self._open: weakref.WeakSet[Prefetch[Any, Any]] = weakref.WeakSet()
        self._read_manifest_counts()
        if self._files.sample_counts and len(self._files.checksums) < len(self._files.sample_counts):
            self.messages.append(
                f"{MANIFEST_NAME} of {str(data_dir)!r} has no checksums, as an earlier version wrote it: values that "
                "changed on the disk would not be noticed. Pack the data again to have them verified."
            )
        if more := self._files.total % size:
            readers = "rank 0 reads" if more == 1 else f"ranks 0 to {more - 1} read"
            others = "the other, whose epochs are" if size - more == 1 else "the others, whose epochs are"
            self.messages.append(
                f"{self._files.total} shards over {size} data-parallel ranks: {readers} one more than {others} shorter."
            )

    # ------------------------------------------------------------------------------------------------ what there is

    @property
    def files(self) -> tuple[Path, ...]:
        """This rank's files, in order of name."""
        return self._files.paths

    @property
    def numbering(self) -> Numbering | None:
        """What the numbers in the samples mean, by `pack.json`; None: there is none."""
        manifest = self._files.manifest
        return None if manifest is None else Numbering(self._files.data_dir, manifest)

    @property
    def file_count_of_all_ranks(self) -> int:
        """Files in the directory."""
        return self._files.total

    @property
    def sample_count(self) -> int:
        """Samples that an epoch of this rank reads, by the files' indexes; skipped files do not count.

        The first use reads the length fields of every file that `pack.json` does not list.
        """
        return sum(self._count_samples(file) for file in range(len(self.files)))

    @property
    def fingerprint(self) -> str:
        """Of everything that gives a cursor its meaning: file names and sizes, partition, shuffling."""
        order = (True, self._order.seed) if self._order.shuffle else (False,)
        return hashlib.sha256(repr((self._files.fingerprint, order)).encode()).hexdigest()[:16]

    def feature_specs(self) -> dict[str, FeatureSpec]:
        """Model input name -> shape and dtype of one sample, from the first sample of the first file that has one.

        Raises:
            DataError: that sample is broken, or every file is.
        """
        for file, path in enumerate(self.files):
            if path in self.skipped_files:
                continue
            try:
                read = functools.partial(read_feature_specs, path, self._input_name_map)
                return persistently(read, f"reading {path}")
            except DataError as error:
                self._skip_or_raise(file, error)
        raise self._all_broken()

    # ------------------------------------------------------------------------------------------------------- batches

    def batches(self, batch_size: int, cursor: DataCursor = START) -> Iterator[Batch]:
        """Batches for training, from `cursor` on, epoch after epoch, without end.

        Continuing from the cursor of a batch gives exactly the samples that would have followed it. Each call reads
        independently of others, with files of its own in memory.

        Raises:
            ParametersError: `batch_size` is not a positive integer.
            DataError: a file is broken; files differ in features, shapes or dtypes; `cursor` is outside of the data;
                a batch is larger than an epoch and may not wrap.
        """
        check_batch_size(batch_size)
        cursor = self._locate(cursor)
        visits = self._endless_visits(cursor)
        blocks = self._read(visits, self._order, cursor)
        return run_ahead(cut_batches(blocks, batch_size, self._last_batch, self._count_dropped), self._open)

    def one_pass(self, batch_size: int) -> Iterator[Batch]:
        """Batches for evaluation: every sample of this rank once, unshuffled, the last batch as short as it comes.

        Raises:
            ParametersError: `batch_size` is not a positive integer.
            DataError: as `batches`.
        """
        check_batch_size(batch_size)
        visits = (_Visit(0, file, file) for file in range(len(self.files)))
        blocks = self._read(visits, EpochOrder(False, 0), DataCursor(epoch=0, sample=0, file=0))
        return run_ahead(cut_batches(blocks, batch_size, "short", self._count_dropped), self._open)

    def cursor_at(self, epoch: int, sample: int) -> DataCursor:
        """The cursor after `sample` samples of an epoch, found through the files' indexes without reading data.

        Raises:
            DataError: the epoch has fewer samples.
        """
        before = 0
        for position, file in enumerate(self._order.files(epoch, len(self.files)).tolist()):
            count = self._count_samples(file)
            if sample < before + count:
                return DataCursor(
                    epoch=epoch, sample=sample, file=position, file_sample=sample - before, fingerprint=self.fingerprint
                )
            before += count
        if sample == before:
            return DataCursor(epoch=epoch + 1, sample=0, file=0, file_sample=0, fingerprint=self.fingerprint)
        raise DataError(
            f"the data position is sample {sample} of epoch {epoch}, but an epoch of {str(self._files.data_dir)!r} has "
            f"{before} samples for this rank: the data changed. Start a new round, or restore the data."
        )

    def close(self) -> None:
        """Stops reading ahead and frees the files kept in memory; iterators still open raise when asked for more."""
        for prefetch in list(self._open):
            prefetch.close()
        self._resident.clear()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------ internals

    def _locate(self, cursor: DataCursor) -> DataCursor:
        if cursor.fingerprint and cursor.fingerprint != self.fingerprint:
            self.messages.append(
                f"the data of {str(self._files.data_dir)!r} (files, partition or shuffling) differ from those of "
                "the checkpoint: training continues at the same position in other samples."
            )
        if cursor.file is None and cursor.sample == 0:
            return DataCursor(epoch=cursor.epoch, sample=0, file=0, file_sample=0, fingerprint=self.fingerprint)
        if cursor.file is None:
            return self.cursor_at(cursor.epoch, cursor.sample)
        if cursor.file >= len(self.files):
            raise DataError(
                f"the data position is in file {cursor.file} (from 0) of epoch {cursor.epoch}, but this rank has "
                f"{len(self.files)} files in {str(self._files.data_dir)!r}: the data changed. Start a new round, or "
                "restore the data."
            )
        return cursor

    def _endless_visits(self, cursor: DataCursor) -> Iterator[_Visit]:
        epoch, first = cursor.epoch, cursor.file or 0
        while True:
            order = self._order.files(epoch, len(self.files)).tolist()
            for position in range(first, len(order)):
                yield _Visit(epoch, position, order[position])
            epoch, first = epoch + 1, 0

    def _read(
        self, visits: Iterator[_Visit], order: EpochOrder, cursor: DataCursor
    ) -> Generator[SampleBlock, None, None]:
        """Files read ahead -> blocks; only the file that `cursor` points into starts in its middle."""
        fingerprint = self.fingerprint
        helper = ThreadPoolExecutor(1, "onward-read") if usable_cores() > 1 else None
        prefetch = Prefetch(visits, lambda visit: self._load_visit(visit, helper), self._capacity)
        self._open.add(prefetch)
        epoch, sample = cursor.epoch, cursor.sample - cursor.file_sample
        try:
            for visit, shard in prefetch:
                if visit.epoch != epoch:
                    epoch, sample = visit.epoch, 0
                here = (visit.epoch, visit.position) == (cursor.epoch, cursor.file)
                first = cursor.file_sample if here else 0
                count = shard.sample_count
                if first >= count:
                    raise DataError(
                        f"the data position is sample {first} of {str(shard.path)!r}, which has {count} samples: the "
                        "data changed. Start a new round, or restore the data."
                    )
                yield SampleBlock(
                    features=shard.features if isinstance(shard, Shard) else shard,
                    count=count,
                    order=order.samples(visit.epoch, self._files.numbers[visit.file], count),
                    first=first,
                    epoch=epoch,
                    sample=sample,
                    file=visit.position,
                    file_count=len(self.files),
                    path=shard.path,
                    fingerprint=fingerprint,
                )
                del shard
                sample += count
        finally:
            prefetch.stop()
            if helper is not None:
                helper.shutdown(wait=False)

    def _load_visit(self, visit: _Visit, helper: Executor | None) -> tuple[_Visit, Shard | Rows] | None:
        """Runs in the background; None: the file is skipped."""
        path = self.files[visit.file]
        if path in self.skipped_files:
            return None
        shard: Shard | Rows | None = self._resident.get(visit.file)
        if shard is None:
            try:
                shard = persistently(lambda: self._load(visit.file, helper), f"reading {path}")
            except DataError as error:
                self._skip_or_raise(visit.file, error)
                return None
            self._sample_counts[visit.file] = shard.sample_count
            if isinstance(shard, Shard) and len(self.files) <= self._capacity:
                self._resident[visit.file] = shard
        return visit, shard

    def _load(self, file: int, helper: Executor | None) -> Shard | Rows:
        """Reads or opens a file; the first time it is compared with what `pack.json` says of it."""
        path, is_verified = self.files[file], file in self._has_rows
        checksum = None if is_verified else self._files.checksums.get(path.name)
        may_have_rows = len(self.files) > self._capacity and self._has_rows.get(file, True)
        rows = None
        if may_have_rows:
            rows = open_rows(path, self._input_name_map, checksum, is_verified=is_verified, helper=helper)
        shard = rows or load_shard(path, self._input_name_map, checksum)
        expected = self._files.sample_counts.get(path.name)
        if expected is not None and shard.sample_count != expected:
            raise DataError(
                f"shard {str(path)!r} has {shard.sample_count} samples, but {MANIFEST_NAME} says {expected}: one of "
                f"them is corrupt. Pack the data again; if the shard was replaced on purpose, delete {MANIFEST_NAME}."
            )
        self._has_rows[file] = rows is not None
        return shard

    def _count_samples(self, file: int) -> int:
        path = self.files[file]
        if file not in self._sample_counts and path not in self.skipped_files:
            try:
                index = persistently(lambda: index_shard(path), f"reading {path}")
                self._sample_counts[file] = index.sample_count
            except DataError as error:
                self._skip_or_raise(file, error)
        return 0 if path in self.skipped_files else self._sample_counts[file]

    def _read_manifest_counts(self) -> None:
        for path, problem in self._files.damaged.items():
            if not self._skip_corrupt:
                raise DataError(problem)
            self.messages.append(f"skipped: {problem}")
            if path in self.files:
                self.skipped_files[path] = problem
        for file, path in enumerate(self.files):
            if path.name in self._files.sample_counts:
                self._sample_counts[file] = self._files.sample_counts[path.name]
        if len(self.skipped_files) == len(self.files):
            raise self._all_broken()

    def _skip_or_raise(self, file: int, error: DataError) -> None:
        if not self._skip_corrupt:
            raise error
        path = self.files[file]
        self.skipped_files[path] = str(error)
        self.messages.append(f"skipped, {len(self.skipped_files)} of {len(self.files)} files so far: {error}")
        if len(self.skipped_files) == len(self.files):
            raise self._all_broken() from error

    def _all_broken(self) -> DataError:
        path, problem = next(iter(self.skipped_files.items()))
        return DataError(
            f"all {len(self.files)} shards of this rank in {str(self._files.data_dir)!r} are broken, nothing is left "
            f"to read. The first, {path.name!r}: {problem}"
        )

    def _count_dropped(self, samples: int) -> None:
        self.dropped_samples += samples

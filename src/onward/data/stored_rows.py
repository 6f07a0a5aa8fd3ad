"""Samples of a shard whose features are taken apart when a batch takes them: read from the file then, or all before.

A file of uniform layout has every sample at a multiple of one size, and every feature at one place in it. Reading a
large sample when a batch takes it copies its bytes once, from the page cache; an entire file in memory costs another
copy and the memory for it. A file that is replaced or cut off meanwhile gives an error, where one mapped into memory
would end the process. Small samples are read with their file, since a call for each costs more than that copy; their
features are cut out of those of a batch, in the processor's cache, which costs nothing next to cutting them out of the
file.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.shard import FeatureBytes, FeatureSpec, bytes_between, find_columns, stacked_shape, verify_checksum
from onward.data.shard_format import LENGTH, locate, new_checksum, read_exactly, unreadable
from onward.errors import DataError
from onward.remote.files import open_binary, url_of
from onward.retries import persistently

_LARGE_SAMPLE_BYTES = 32 << 10
"""From this size on, the call that reads a sample costs less than the copies that it saves."""
_WORTH_TWO_THREADS_BYTES = 2 << 20
"""Of the samples of a batch in a file: reading half of them takes 200 us."""
_CHUNK_BYTES = 4 << 20
_GATHERED_BYTES = 128 << 10
"""So many bytes of samples are gathered before their features are cut out: about what stays in a core's cache."""


class Rows:
    """The samples of one shard file, all of which have the layout of the first.

    Attributes:
        path: the file.
        specs: model input name -> shape (without axes of an only element) and dtype of one sample.
        sample_count: number of samples.
    """

    def __init__(self, path: Path, sample_count: int, template: np.ndarray, columns: Sequence[FeatureBytes]) -> None:
        self.path = path
        self.sample_count = sample_count
        self.specs: dict[str, FeatureSpec] = {
            one.name: FeatureSpec(stacked_shape(one.spec.shape), np.dtype(one.spec.dtype))
            for one in columns
            if one.name
        }
        self._template = template
        raw = sorted((one.start, one.end) for one in columns)
        self._fixed = bytes_between(raw, len(template))
        named = {(one.start, one.end): one.name for one in columns}
        # The bytes of a sample from first to last: what belongs to a feature, and what does not.
        self._parts = sorted([*((start, end, named[start, end]) for start, end in raw if start < end),
                              *((start, end, "") for start, end in self._fixed)])  # fmt: skip

    def read(self, numbers: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Fills arrays with samples.

        Args:
            numbers: of the samples, in the file.
            out: feature -> array [samples, *sample shape], contiguous.

        Raises:
            DataError: the file cannot be read, was cut off, or changed since it was opened.
        """
        raise NotImplementedError

    def _read_all(self, descriptor: int, checksum: str | None, table: np.ndarray | None = None) -> bool:
        """Reads the entire file once, into a table [samples, bytes] if given; whether all have the layout of the first.

        Raises:
            DataError: the bytes have another checksum.
            OSError: the file cannot be read.
        """
        found = None if checksum is None else new_checksum()
        sample_bytes = len(self._template)
        rows = max(1, _CHUNK_BYTES // sample_bytes)
        buffer = np.empty((min(rows, self.sample_count), sample_bytes), np.uint8) if table is None else table
        for start in range(0, self.sample_count, rows):
            count = min(rows, self.sample_count - start)
            part = buffer[:count] if table is None else table[start : start + count]
            content = part.reshape(-1).data
            _read_at(descriptor, content, self.path, start * sample_bytes)
            if found is not None:
                found.update(content)
            if not all((part[:, a:b] == self._template[a:b]).all() for a, b in self._fixed):
                return False
        verify_checksum(self.path, checksum, found)
        return True


def _as_bytes(out: Mapping[str, np.ndarray], names: Iterable[str], count: int) -> dict[str, np.ndarray]:
    """Arrays [samples, *sample shape] that hold something, as bytes [samples, bytes]."""
    return {name: out[name].reshape(count, -1).view(np.uint8) for name in names if out[name].size}


class LoadedRows(Rows):
    """Samples in memory as they are in the file."""

    def __init__(self, path: Path, sample_count: int, template: np.ndarray, columns: Sequence[FeatureBytes]) -> None:
        super().__init__(path, sample_count, template, columns)
        self._table = np.empty((sample_count, len(template)), np.uint8)
        rows = min(sample_count, max(1, _GATHERED_BYTES // len(template)))
        self._gathered = np.empty((rows, len(template)), np.uint8)

    def load(self, descriptor: int, checksum: str | None) -> bool:
        """Fills the table; whether all samples have the layout of the first. Raises as `_read_all`."""
        return self._read_all(descriptor, checksum, self._table)

    def read(self, numbers: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """See `Rows`."""
        targets, rows = _as_bytes(out, self.specs, len(numbers)), len(self._gathered)
        for first in range(0, len(numbers), rows):
            chosen = numbers[first : first + rows]
            part = self._gathered[: len(chosen)]
            # mode="clip" writes straight into the target; the default buffers it.
            np.take(self._table, chosen, axis=0, out=part, mode="clip")
            for start, end, name in self._parts:
                if name:
                    targets[name][first : first + len(chosen)] = part[:, start:end]


class StoredRows(Rows):
    """Samples that are read from the file when they are asked for, the later half by `helper` if there are many."""

    def __init__(
        self,
        file: FileIO,
        path: Path,
        sample_count: int,
        template: np.ndarray,
        columns: Sequence[FeatureBytes],
        helper: Executor | None,
    ) -> None:
        super().__init__(path, sample_count, template, columns)
        self._helper = helper
        self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def verify(self, checksum: str | None) -> bool:
        """Reads the file to its end; whether all samples have the layout of the first. Raises as `_read_all`."""
        return self._read_all(self._descriptor, checksum)

    def read_ahead(self) -> None:
        """Asks the operating system to read the file into its cache, in the background."""
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_WILLNEED)

    def read(self, numbers: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """See `Rows`."""
        targets = _as_bytes(out, self.specs, len(numbers))
        scratch = np.empty(
            (len(numbers), len(self._template) - sum(one.shape[1] for one in targets.values())), np.uint8
        )
        parts, fixed, used = [], [], 0
        for start, end, name in self._parts:
            if name:
                parts.append(targets[name])
                continue
            parts.append(scratch[:, used : used + end - start])
            used += end - start
            if (start, end) in self._fixed:
                fixed.append((parts[-1], self._template[start:end]))
        chosen = numbers.tolist()

        def fill(rows: range) -> None:
            for row in rows:
                self._read_sample([part[row] for part in parts], chosen[row])

        own, others = len(chosen), None
        if self._helper is not None and own * len(self._template) >= _WORTH_TWO_THREADS_BYTES:
            own //= 2
            others = self._helper.submit(fill, range(own, len(chosen)))
        fill(range(own))
        if others is not None:
            others.result()
        for found, expected in fixed:
            if not (same := (found == expected).all(axis=1)).all():
                number = int(numbers[int(np.argmin(same))])
                raise DataError(
                    f"{locate(self.path, number, number * len(self._template))}: the sample has another layout than "
                    "the first of its file, which it had when it was verified. Do not write to shards that are being "
                    "trained on."
                )

    def _read_sample(self, buffers: list[Any], number: int) -> None:
        offset = number * len(self._template)
        try:
            if os.preadv(self._descriptor, buffers, offset) == len(self._template):
                return
        except OSError:
            pass  # tried again below, for as long as the reason may pass
        whole = memoryview(bytearray(len(self._template)))
        try:
            persistently(lambda: _read_at(self._descriptor, whole, self.path, offset), f"reading {self.path}")
        except OSError as error:
            raise unreadable(self.path, error) from error
        position = 0
        for buffer in buffers:
            buffer[:] = np.frombuffer(whole[position : position + len(buffer)], np.uint8)
            position += len(buffer)


def open_rows(
    path: Path,
    input_name_map: Mapping[str, str],
    checksum: str | None,
    *,
    is_verified: bool,
    helper: Executor | None = None,
) -> Rows | None:
    """A local shard whose samples all have the layout of the first; None for any other.

    Args:
        path, input_name_map, checksum: as `load_shard` has them.
        helper: another thread, which reads half of large batches.
        is_verified: the file was read to its end before; large samples are not read before a batch takes them then,
            and are compared with the layout of the first.

    Raises:
        DataError: the file cannot be read, its first sample is broken or lacks a feature, or its bytes have another
            checksum.
    """
    if url_of(path) is not None:
        return None
    try:
        with open_binary(path) as file:
            first = _first_sample(file, path)
            columns = None if first is None else find_columns(first, path, input_name_map)
            if first is None or columns is None:
                return None
            count, template = os.fstat(file.fileno()).st_size // len(first), np.frombuffer(first, np.uint8)
            if len(first) < _LARGE_SAMPLE_BYTES:
                loaded = LoadedRows(path, count, template, columns)
                return loaded if loaded.load(file.fileno(), checksum) else None
            rows = StoredRows(file, path, count, template, columns, helper)
        if is_verified:
            rows.read_ahead()
            return rows
        return rows if rows.verify(checksum) else None
    except OSError as error:
        raise unreadable(path, error) from error


def _first_sample(file: FileIO, path: Path) -> memoryview | None:
    """With its length field; None where the file does not consist of samples of this size."""
    file_bytes = os.fstat(file.fileno()).st_size
    if file_bytes < LENGTH.size:
        return None
    head = bytearray(LENGTH.size)
    read_exactly(file, memoryview(head), path, 0)
    sample_bytes = LENGTH.size + LENGTH.unpack(head)[0]
    if sample_bytes > file_bytes or file_bytes % sample_bytes:
        return None
    first = memoryview(bytearray(sample_bytes))
    read_exactly(file, first, path, 0)
    return first


def _read_at(descriptor: int, buffer: memoryview, path: Path, offset: int) -> None:
    with FileIO(descriptor, closefd=False) as file:
        read_exactly(file, buffer, path, offset)

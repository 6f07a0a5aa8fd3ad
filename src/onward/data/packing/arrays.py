""".npz and .npy files -> one feature per array, read row by row whatever their size."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from onward.data.packing.options import ArrayOptions
from onward.data.packing.source import Advance, ChooseSplit, Read, Sample, Source
from onward.data.packing.splits import one_after_the_other
from onward.errors import DataError
from onward.parameters.limits import DEFAULT_LIMITS, Limits

_ROWS_BYTES = 1 << 20
_DAMAGES = (OSError, ValueError, zipfile.BadZipFile, zlib.error)
"""What reading a broken archive raises."""


def open_arrays(
    paths: list[Path], options: ArrayOptions, test_paths: Sequence[Path] = (), limits: Limits = DEFAULT_LIMITS
) -> Source:
    """Opens .npz files, read one after the other, or .npy files, read side by side; and others for testing alone.

    Raises:
        DataError: a file is broken, arrays differ in length, both kinds of file are mixed, or more of an array would be
            unpacked at once than the limits allow.
    """
    total, read = _open(paths, options, limits)
    if test_paths:
        more, read_test = _open(test_paths, options, limits)
        total, read = total + more, one_after_the_other(read, read_test)
    return Source(unit="samples", total=total, read=read)


def _open(paths: Sequence[Path], options: ArrayOptions, limits: Limits) -> tuple[int, Read]:
    archives = [path for path in paths if path.suffix.lower() == ".npz"]
    if archives and len(archives) != len(paths):
        raise DataError(
            f"{len(archives)} .npz and {len(paths) - len(archives)} .npy files: it is unclear which to pack. "
            "Choose with --pattern '*.npz' or '*.npy'."
        )
    groups = [{path.stem: path for path in paths}] if not archives else []
    if groups and len(groups[0]) != len(paths):
        raise DataError(
            f"among {len(paths)} .npy files some have the same name in different folders; pack them separately."
        )
    lengths = [_measure_archive(path, options, limits) for path in archives] or [_measure_files(groups[0], options)]
    return sum(lengths), partial(_read, archives, groups, options)


def _read(
    archives: list[Path],
    groups: list[dict[str, Path]],
    options: ArrayOptions,
    choose_split: ChooseSplit,
    advance: Advance,
) -> Iterator[tuple[str, Sample]]:
    number = 0
    readers = [_read_archive(path, options) for path in archives] + [_read_files(group, options) for group in groups]
    for reader in readers:
        for sample in reader:
            yield choose_split(number), sample
            number += 1
            advance(1)


def _choose(names: list[str], options: ArrayOptions, where: str) -> list[str]:
    unknown = [name for name in options.arrays if name not in names]
    if unknown:
        raise DataError(f"{where} holds no array {unknown[0]!r}; it holds {', '.join(map(repr, names))}.")
    return list(options.arrays) or names


def _check_lengths(shapes: dict[str, tuple[int, ...]], where: str) -> int:
    lengths = {name: shape[0] if shape else None for name, shape in shapes.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise DataError(
            f"{where}: axis 0 of the arrays counts the samples, but they have {lengths}. Choose those that belong "
            "together with --arrays."
        )
    return int(next(iter(shapes.values()))[0])


# --------------------------------------------------------------------------------------------------------------- .npy


def _measure_files(group: dict[str, Path], options: ArrayOptions) -> int:
    names = _choose(list(group), options, "the source")
    return _check_lengths({name: _map_file(group[name]).shape for name in names}, "the source")


def _map_file(path: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"array {str(path)!r} cannot be read: {error}.") from error
    return array


def _read_files(group: dict[str, Path], options: ArrayOptions) -> Iterator[Sample]:
    arrays = {name: _map_file(group[name]) for name in _choose(list(group), options, "the source")}
    for row in range(len(next(iter(arrays.values())))):
        yield {name: np.array(array[row]) for name, array in arrays.items()}


# --------------------------------------------------------------------------------------------------------------- .npz


def _open_archive(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"archive {str(path)!r} cannot be read: {error}. It is not a complete .npz file.") from error


def _members(archive: zipfile.ZipFile, path: Path, options: ArrayOptions) -> dict[str, str]:
    """Array name -> archive member."""
    names = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
    return {name: names[name] for name in _choose(list(names), options, f"archive {str(path)!r}")}


def _read_header(file: IO[bytes], path: Path, name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in Fortran order, dtype."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except _DAMAGES as error:
        raise DataError(f"archive {str(path)!r}: array {name!r} cannot be read: {error}.") from error
    if dtype.hasobject:
        raise DataError(f"archive {str(path)!r}: array {name!r} holds Python objects (a pickle), which is not loaded.")
    return shape, fortran, dtype


def _measure_archive(path: Path, options: ArrayOptions, limits: Limits) -> int:
    with _open_archive(path) as archive:
        shapes = {}
        for name, member in _members(archive, path, options).items():
            with archive.open(member) as file:
                shape, fortran, dtype = _read_header(file, path, name)
                _check_size(path, name, shape if fortran else shape[1:], dtype, limits)
                shapes[name] = shape
    if not shapes:
        raise DataError(f"archive {str(path)!r} holds no arrays.")
    return _check_lengths(shapes, f"archive {str(path)!r}")


def _check_size(path: Path, name: str, held: tuple[int, ...], dtype: np.dtype, limits: Limits) -> None:
    """Refuses an array of which more would be unpacked at once than is allowed: a small archive can hold any size."""
    size = math.prod(held) * dtype.itemsize
    if size > limits.array_gb * 1e9:
        raise DataError(
            f"archive {str(path)!r}: {size / 1e9:,.1f} GB of array {name!r} ({dtype}, {list(held)}) would be unpacked "
            f"at once; at most {limits.array_gb:,.10g} are allowed. If the data are as intended, "
            "pass --limits.array_gb."
        )


def _read_archive(path: Path, options: ArrayOptions) -> Iterator[Sample]:
    """Unpacks all arrays of an archive in step, so that none is ever entirely in memory."""
    with _open_archive(path) as archive, ExitStack() as stack:
        rows = {}
        for name, member in _members(archive, path, options).items():
            rows[name] = _read_rows(stack.enter_context(archive.open(member)), path, name)
        for values in zip(*rows.values(), strict=True):
            yield dict(zip(rows, values, strict=True))


def _read_rows(file: IO[bytes], path: Path, name: str) -> Iterator[np.ndarray]:
    shape, fortran, dtype = _read_header(file, path, name)
    count, row_shape = shape[0], shape[1:]
    row_bytes = math.prod(row_shape) * dtype.itemsize
    # Rows of an array in Fortran order are scattered over all of it.
    rows = count if fortran else max(1, _ROWS_BYTES // max(1, row_bytes))
    for start in range(0, count, max(1, rows)):
        taken = min(rows, count - start)
        try:
            data = file.read(taken * row_bytes)
        except _DAMAGES as error:
            raise DataError(f"archive {str(path)!r}: array {name!r} is damaged after row {start}: {error}.") from error
        if len(data) != taken * row_bytes:
            raise DataError(f"archive {str(path)!r}: array {name!r} ends before row {count}; it is cut off.")
        block: np.ndarray = np.frombuffer(data, dtype).reshape((taken, *row_shape), order="F" if fortran else "C")
        for row in block:
            yield np.array(row)

"""One shard file in memory: every feature stacked into one array over the file's samples.

Samples written by one program mostly have the same layout byte for byte; such files are read by slicing columns out of
a table of bytes, everything else is parsed sample by sample.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import onnx
import xxhash
from onnx import TensorProto

from onward.data.manifest import MANIFEST_NAME
from onward.data.shard_format import (
    CHECKSUM_PREFIX,
    LEAVE_OUT,
    LENGTH,
    PLAIN_TYPES,
    ShardIndex,
    checksum_text,
    index_shard,
    locate,
    new_checksum,
    parse_feature,
    read_exactly,
    split_sample,
    tensor_to_array,
    unreadable,
)
from onward.errors import DataError, ParametersError
from onward.remote.files import open_binary

_CHUNK_BYTES = 4 << 20
"""How much of a file is read at a time: about what stays in a processor's cache while columns are copied out."""


@dataclass(frozen=True)
class FeatureSpec:
    """What one sample holds of a feature: its shape without the batch axis, and its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Shard:
    """An entire shard file.

    Attributes:
        path: the file.
        features: model input name -> array [samples, *sample shape]; a feature of exactly one element per sample
            (a scalar, [1], [1, 1]) is [samples].
        sample_count: number of samples.
    """

    path: Path
    features: Mapping[str, np.ndarray]
    sample_count: int

    @property
    def byte_count(self) -> int:
        """Memory that the arrays take."""
        return sum(array.nbytes for array in self.features.values())


@dataclass(frozen=True)
class FeatureBytes:
    """Where a feature's raw data are in every sample of a file of uniform layout."""

    name: str
    start: int
    end: int
    spec: FeatureSpec


def stacked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one sample inside a batch: an only element has no axis of its own."""
    return () if math.prod(shape) == 1 else shape


def load_shard(path: str | os.PathLike[str], input_name_map: Mapping[str, str], checksum: str | None = None) -> Shard:
    """Reads an entire shard file.

    Args:
        path: the file.
        input_name_map: name in the file -> model input name; "": that feature is left out. What it does not list has
            its own name, unless the map gives that to another feature.
        checksum: of the file's bytes, as `ShardWriter.checksum` gives it; None: they are not verified.

    Raises:
        DataError: naming file, sample number and byte offset, when the file is cut off or corrupt, when a feature is
            missing in a sample, or when shapes or dtypes differ between samples; or the file's bytes have another
            checksum.
    """
    path = Path(path)
    found = None if checksum is None else new_checksum()
    try:
        with open_binary(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            sample_bytes = 0
            if file_bytes >= LENGTH.size:
                head = bytearray(LENGTH.size)
                read_exactly(file, memoryview(head), path, 0)
                sample_bytes = LENGTH.size + LENGTH.unpack(head)[0]
            if 0 < sample_bytes <= file_bytes and file_bytes % sample_bytes == 0:
                shard = _load_uniform(file, path, file_bytes, sample_bytes, input_name_map, found)
                if shard is not None:
                    verify_checksum(path, checksum, found)
                    return shard
            found = None if checksum is None else new_checksum()
            shard = _load_parsed(file, index_shard(path), input_name_map, found)
            verify_checksum(path, checksum, found)
            return shard
    except OSError as error:
        raise unreadable(path, error) from error


def verify_checksum(path: Path, expected: str | None, found: xxhash.xxh3_64 | None) -> None:
    """Raises DataError where a file's bytes have another checksum than expected; None: not to be verified."""
    if expected is None or found is None or checksum_text(found) == expected:
        return
    if not expected.startswith(CHECKSUM_PREFIX):
        raise DataError(
            f"shard {str(path)!r} has the checksum {expected!r} in {MANIFEST_NAME}, which this onward cannot verify: "
            "update onward."
        )
    raise DataError(
        f"shard {str(path)!r} is corrupt: its bytes have the checksum {checksum_text(found)}, but {MANIFEST_NAME} says "
        f"{expected}. Copy it again or pack again; to train without it, set data.skip_corrupt_files; if it was "
        f"replaced on purpose, delete {MANIFEST_NAME}."
    )


def read_feature_specs(path: str | os.PathLike[str], input_name_map: Mapping[str, str]) -> dict[str, FeatureSpec]:
    """Shapes (as `Shard.features` has them, without the batch axis) and dtypes, from a file's first sample.

    Raises:
        DataError: as `load_shard`, for the first sample.
    """
    path = Path(path)
    try:
        with open_binary(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            head = bytearray(LENGTH.size)
            if file_bytes < LENGTH.size:
                index_shard(path)
            read_exactly(file, memoryview(head), path, 0)
            size = LENGTH.unpack(head)[0]
            if size > file_bytes - LENGTH.size:
                index_shard(path)
            sample = memoryview(bytearray(size))
            read_exactly(file, sample, path, LENGTH.size)
            arrays = _parse_sample(sample, path, 0, 0, input_name_map)
    except OSError as error:
        raise unreadable(path, error) from error
    return {name: FeatureSpec(stacked_shape(array.shape), array.dtype) for name, array in arrays.items()}


def _row_ranges(row_count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    rows = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, row_count, rows):
        yield start, min(start + rows, row_count)


# ------------------------------------------------------------------------------------------------- uniform layout


def _load_uniform(
    file: FileIO,
    path: Path,
    file_bytes: int,
    sample_bytes: int,
    input_name_map: Mapping[str, str],
    checksum: xxhash.xxh3_64 | None,
) -> Shard | None:
    """Reads a file whose samples all have the layout of the first one; None where they have not."""
    first = memoryview(bytearray(sample_bytes))
    read_exactly(file, first, path, 0)
    columns = find_columns(first, path, input_name_map)
    if columns is None:
        return None
    raw = sorted((column.start, column.end) for column in columns)
    fixed = bytes_between(raw, sample_bytes)
    count = file_bytes // sample_bytes
    template = np.frombuffer(first, dtype=np.uint8)
    wanted = {column.name: column for column in columns if column.name}
    out = {
        name: np.empty((count, *stacked_shape(column.spec.shape)), column.spec.dtype) for name, column in wanted.items()
    }
    rows_of = {name: array.reshape(-1).view(np.uint8).reshape(count, -1) for name, array in out.items() if array.size}
    buffer = memoryview(bytearray(sample_bytes * min(count, max(1, _CHUNK_BYTES // sample_bytes))))
    for start, stop in _row_ranges(count, sample_bytes):
        part = buffer[: (stop - start) * sample_bytes]
        read_exactly(file, part, path, start * sample_bytes)
        if checksum is not None:
            checksum.update(part)
        table = np.frombuffer(part, dtype=np.uint8).reshape(stop - start, sample_bytes)
        if not all(
            np.array_equal(table[:, a:b], np.broadcast_to(template[a:b], (stop - start, b - a))) for a, b in fixed
        ):
            return None
        for name, rows in rows_of.items():
            rows[start:stop] = table[:, wanted[name].start : wanted[name].end]
    return Shard(path, out, count)


def bytes_between(raw: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The byte ranges of a sample of `size` bytes that no raw data cover."""
    edges = [0, *(edge for pair in raw for edge in pair), size]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def find_columns(sample: memoryview, path: Path, input_name_map: Mapping[str, str]) -> list[FeatureBytes] | None:
    """The raw data of the first sample's features; features not asked for have no name. None: not all are raw."""
    arrays = _parse_sample(sample[LENGTH.size :], path, 0, 0, input_name_map)
    columns: dict[str, FeatureBytes] = {}
    ignored: list[FeatureBytes] = []
    for offset, data in split_sample(sample[LENGTH.size :], path, 0, 0):
        proto = parse_feature(data, path, 0, offset)
        found = _find_raw_data(data)
        name = _map_name(proto.name, input_name_map)
        if found is None or proto.data_type not in PLAIN_TYPES or name in columns:
            return None
        start, end = (offset + LENGTH.size + edge for edge in found)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(proto.data_type)
        if name is None:
            ignored.append(FeatureBytes("", start, end, FeatureSpec((), dtype)))
            continue
        if np.dtype(dtype).newbyteorder("<") != dtype or arrays[name].nbytes != end - start:
            return None
        columns[name] = FeatureBytes(name, start, end, FeatureSpec(arrays[name].shape, dtype))
    return [*columns.values(), *ignored]


def _find_raw_data(message: memoryview) -> tuple[int, int] | None:
    """Start and end of `TensorProto.raw_data` in a serialized message; None unless it is there exactly once."""
    position, found = 0, None
    while position < len(message):
        tag, position = _read_varint(message, position)
        kind = tag & 7
        if kind == 0:
            _, position = _read_varint(message, position)
        elif kind == 1:
            position += 8
        elif kind == 5:
            position += 4
        elif kind == 2:
            size, position = _read_varint(message, position)
            if tag >> 3 == TensorProto.RAW_DATA_FIELD_NUMBER:
                if found is not None:
                    return None
                found = position, position + size
            position += size
        else:
            return None
    return found


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


# ---------------------------------------------------------------------------------------------- sample by sample


def _load_parsed(
    file: FileIO, index: ShardIndex, input_name_map: Mapping[str, str], checksum: xxhash.xxh3_64 | None
) -> Shard:
    path, offsets = index.path, index.offsets
    out: dict[str, np.ndarray] = {}
    specs: dict[str, FeatureSpec] = {}
    for number in range(index.sample_count):
        offset = int(offsets[number])
        sample = memoryview(bytearray(int(offsets[number + 1]) - offset - LENGTH.size))
        read_exactly(file, sample, path, offset + LENGTH.size)
        if checksum is not None:
            checksum.update(LENGTH.pack(len(sample)))  # which the index was made from
            checksum.update(sample)
        arrays = _parse_sample(sample, path, number, offset, input_name_map)
        if number == 0:
            specs = {name: FeatureSpec(array.shape, array.dtype) for name, array in arrays.items()}
            out = {
                name: np.empty((index.sample_count, *stacked_shape(spec.shape)), spec.dtype)
                for name, spec in specs.items()
            }
        _check_same(arrays, specs, path, number, offset)
        for name, array in arrays.items():
            out[name][number] = array.reshape(stacked_shape(array.shape))
    return Shard(path, out, index.sample_count)


def _map_name(name: str, input_name_map: Mapping[str, str]) -> str | None:
    if name in input_name_map:
        return input_name_map[name] or None
    return None if name in input_name_map.values() else name


def _parse_sample(
    sample: memoryview, path: Path, number: int, offset: int, input_name_map: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Model input name -> value, of one sample; of a repeated name the last counts."""
    arrays: dict[str, np.ndarray] = {}
    seen: list[str] = []
    for here, data in split_sample(sample, path, number, offset):
        proto = parse_feature(data, path, number, here)
        seen.append(proto.name)
        name = _map_name(proto.name, input_name_map)
        if name is not None:
            arrays[name] = tensor_to_array(proto, path, number, here)
    if not seen:
        raise DataError(f"{locate(path, number, offset)}: the sample has no features. The file is corrupt.")
    for name_in_file, name in input_name_map.items():
        if name and name not in arrays:
            close = difflib.get_close_matches(name_in_file, seen, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise DataError(
                f"{locate(path, number, offset)}: feature {name_in_file!r} (for the model's input {name!r}) is "
                f"missing. The sample holds {', '.join(map(repr, sorted(set(seen))))}{hint} Change data.input_name_map "
                "or the file."
            )
    return arrays


def _check_same(
    arrays: Mapping[str, np.ndarray], specs: Mapping[str, FeatureSpec], path: Path, number: int, offset: int
) -> None:
    for name, spec in specs.items():
        if name not in arrays:
            raise DataError(
                f"{locate(path, number, offset)}: feature {name!r} is missing, which sample 0 holds. Every sample of a "
                "file must hold the same features."
            )
        found = FeatureSpec(arrays[name].shape, arrays[name].dtype)
        if found != spec:
            raise DataError(
                f"{locate(path, number, offset)}: feature {name!r} is {found}, but {spec} in sample 0. All samples "
                f"must have one shape and dtype: pad or cut them when packing. {LEAVE_OUT}"
            )
    if len(arrays) > len(specs):
        extra = ", ".join(repr(name) for name in arrays if name not in specs)
        raise DataError(
            f"{locate(path, number, offset)}: features {extra} are not in sample 0. Every sample of a file must hold "
            f"the same features. {LEAVE_OUT}"
        )


def check_name_map(input_name_map: Mapping[str, str]) -> None:
    """Raises ParametersError where two features are to be one input of the model."""
    taken: dict[str, str] = {}
    for name_in_file, name in input_name_map.items():
        if not name:
            continue
        if name in taken:
            raise ParametersError(
                f"data.input_name_map gives the model's input {name!r} two features, {taken[name]!r} and "
                f"{name_in_file!r}; name each input once."
            )
        taken[name] = name_in_file

"""The byte format of a shard file: writing samples, walking over them, reading them back.

The format is that of ONNX Runtime's training runner. A file has no header and no footer: samples are back to back
until its end. A sample is its size (uint32, little-endian, counting everything of the sample after these four bytes)
and then its features; a feature is its size (uint32, little-endian) and that many bytes of a serialized
`onnx.TensorProto`, whose name is the feature's and whose shape has no batch axis.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import xxhash
from google.protobuf.message import DecodeError
from onnx import TensorProto, numpy_helper

from onward.errors import DataError
from onward.remote.files import open_binary, shown

LEAVE_OUT = '`data.input_name_map: {NAME: ""}` leaves a feature out.'
LENGTH = struct.Struct("<I")
"""A sample's and a feature's length field."""

LARGEST_SAMPLE_BYTES = 2**32 - 1
LARGEST_FEATURE_BYTES = 2**31 - 1
"""Protobuf's own limit for one message."""

_WINDOW_BYTES = 4096
_RAW_DATA_TAG = bytes([(9 << 3) | 2])

PLAIN_TYPES = frozenset(
    TensorProto.DataType.Value(name)
    for name in (
        "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "BOOL", "FLOAT16", "DOUBLE", "UINT32", "UINT64",
        "COMPLEX64", "COMPLEX128", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ",
    )
)  # fmt: skip
"""Element types whose raw bytes are a numpy array's, one element after the other."""


@dataclass(frozen=True)
class ShardIndex:
    """Where each sample of a shard file starts.

    Attributes:
        path: the file.
        offsets: int64 [samples + 1]: byte offset of each sample's length field; the last entry is the file's size.
    """

    path: Path
    offsets: np.ndarray

    @property
    def sample_count(self) -> int:
        """Number of samples in the file."""
        return len(self.offsets) - 1

    @property
    def byte_count(self) -> int:
        """Size of the file in bytes."""
        return int(self.offsets[-1])


def locate(path: Path, sample: int, offset: int) -> str:
    """How error messages name a place in a shard; samples and bytes count from 0."""
    return f"shard {str(path)!r}, sample {sample}, byte {offset}"


CHECKSUM_PREFIX = "xxh3-64:"
"""How `pack.json` names the algorithm before a checksum. Measured on one core, XXH3 takes 15 GB/s, CRC-32 2 GB/s."""


def new_checksum() -> xxhash.xxh3_64:
    """An empty checksum of a shard, to be updated with its bytes in order."""
    return xxhash.xxh3_64()


def checksum_text(checksum: xxhash.xxh3_64) -> str:
    """A checksum with its algorithm, as `pack.json` lists it."""
    return f"{CHECKSUM_PREFIX}{checksum.hexdigest()}"


# ---------------------------------------------------------------------------------------------------------- writing


@lru_cache(maxsize=256)
def _feature_header(name: str, element_type: int, shape: tuple[int, ...]) -> bytes:
    return bytes(TensorProto(name=name, data_type=element_type, dims=shape).SerializeToString())


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _encode_feature(name: str, value: np.ndarray) -> bytes:
    array = np.asarray(value)
    try:
        element_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype.newbyteorder("="))
    except (KeyError, ValueError):
        element_type = TensorProto.STRING
    if element_type == TensorProto.STRING:
        raise DataError(f"feature {name!r} has dtype {array.dtype}; a shard holds numbers: convert it first.")
    if array.nbytes > LARGEST_FEATURE_BYTES - 1024:
        raise DataError(
            f"feature {name!r} has {array.nbytes} bytes in one sample; at most 2 GiB fit (a protobuf message)."
        )
    if element_type not in PLAIN_TYPES:
        return bytes(numpy_helper.from_array(array, name).SerializeToString())
    raw = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return _feature_header(name, element_type, array.shape) + _RAW_DATA_TAG + _varint(len(raw)) + raw


def encode_sample(features: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of one sample, its length field included.

    Args:
        features: name -> value without a batch axis, of any ONNX element type but strings.

    Raises:
        DataError: no features, strings, or a sample that its length field cannot express.
    """
    if not features:
        raise DataError("a sample needs at least one feature.")
    parts = [b""]
    for name, value in features.items():
        encoded = _encode_feature(name, value)
        parts += (LENGTH.pack(len(encoded)), encoded)
    size = sum(map(len, parts))
    if size > LARGEST_SAMPLE_BYTES:
        raise DataError(
            f"a sample of {size} bytes does not fit: its length field holds at most {LARGEST_SAMPLE_BYTES}."
        )
    parts[0] = LENGTH.pack(size)
    return b"".join(parts)


def write_sample(file: BinaryIO, features: Mapping[str, np.ndarray]) -> int:
    """Appends one sample to an open binary file; returns the bytes written. Raises as `encode_sample`."""
    encoded = encode_sample(features)
    file.write(encoded)
    return len(encoded)


# ---------------------------------------------------------------------------------------------------------- reading


def index_shard(path: str | os.PathLike[str]) -> ShardIndex:
    """Finds where each sample starts, reading length fields only.

    Raises:
        DataError: the file is missing, unreadable or empty, or a length reaches past its end.
    """
    path = Path(path)
    offsets = [0]
    try:
        with open_binary(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            window, start = b"", 0
            while (offset := offsets[-1]) < file_bytes:
                if offset + 4 > start + len(window):
                    window, start = os.pread(file.fileno(), _WINDOW_BYTES, offset), offset
                if offset + 4 > start + len(window):
                    raise _cut_off(path, len(offsets) - 1, offset, "its length field has 4 bytes", file_bytes - offset)
                size = LENGTH.unpack_from(window, offset - start)[0]
                if offset + 4 + size > file_bytes:
                    expected = f"its length field says that {size} bytes follow"
                    raise _cut_off(path, len(offsets) - 1, offset, expected, file_bytes - offset - 4)
                offsets.append(offset + 4 + size)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(offsets) == 1:
        raise DataError(
            f"shard {str(path)!r} is empty (0 bytes); it was not written completely: copy or pack it again."
        )
    return ShardIndex(path, np.asarray(offsets, dtype=np.int64))


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a shard that the operating system does not hand over."""
    return DataError(f"shard {shown(path)!r} cannot be read: {error.strerror or error}.")


def _cut_off(path: Path, sample: int, offset: int, expected: str, found: int) -> DataError:
    return DataError(
        f"{locate(path, sample, offset)}: {expected}, but only {found} are left in the file. It is cut off, corrupt "
        "or not a shard: copy or pack it again, or set data.skip_corrupt_files to leave it out."
    )


def read_exactly(file: FileIO, buffer: memoryview, path: Path, offset: int) -> None:
    """Fills `buffer` from `offset` on.

    Raises:
        DataError: the file ended before; it shrank after it was indexed.
    """
    file.seek(offset)
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise DataError(
                f"shard {str(path)!r} ended at byte {offset + done} while bytes {offset} to {offset + len(buffer)} "
                "were read; something shortened it meanwhile. Do not write to shards that are being trained on."
            )
        done += count


def split_sample(sample: memoryview, path: Path, number: int, offset: int) -> Iterator[tuple[int, memoryview]]:
    """Walks over the features of one sample.

    Args:
        sample: the sample's bytes without its length field.
        path, number, offset: file, sample number and offset of the sample's length field, for messages.

    Yields:
        (byte offset of the feature's length field in the file, the serialized TensorProto).

    Raises:
        DataError: a length reaches past the end of the sample.
    """
    position = 0
    while position < len(sample):
        here = offset + 4 + position
        left = len(sample) - position - 4
        size = LENGTH.unpack_from(sample, position)[0] if left >= 0 else 0
        if left < 0 or size > left:
            found = f"a feature of {size} bytes" if left >= 0 else "the start of a feature's length field"
            raise DataError(
                f"{locate(path, number, here)}: {found} does not fit where only {len(sample) - position} bytes of the "
                f"sample (which starts at byte {offset} and has {len(sample)} bytes) are left. The file is corrupt: "
                "copy or pack it again, or set data.skip_corrupt_files to leave it out."
            )
        yield here, sample[position + 4 : position + 4 + size]
        position += 4 + size


def parse_feature(data: memoryview, path: Path, number: int, offset: int) -> TensorProto:
    """Parses one serialized TensorProto.

    Raises:
        DataError: the bytes are not a TensorProto, or it has no name, no element type, or data elsewhere.
    """
    proto = TensorProto()
    try:
        proto.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{locate(path, number, offset)}: {len(data)} bytes that should be an onnx.TensorProto are not ({error}). "
            "The file is corrupt: copy or pack it again, or set data.skip_corrupt_files to leave it out."
        ) from error
    if not isinstance(proto.name, str):
        # protobuf hands proto2 strings that are not UTF-8 over as bytes.
        raise DataError(
            f"{locate(path, number, offset)}: the feature's name {proto.name!r} is not UTF-8. The file is corrupt: "
            "copy or pack it again, or set data.skip_corrupt_files to leave it out."
        )
    if not proto.name:
        raise DataError(f"{locate(path, number, offset)}: a feature without a name; expected onnx.TensorProto.name.")
    return proto


def tensor_to_array(proto: TensorProto, path: Path, number: int, offset: int) -> np.ndarray:
    """The values of a feature; raw data are viewed, typed fields are converted.

    Raises:
        DataError: dimensions, element type and number of bytes do not agree, or the element type is not a number's.
    """
    where = f"{locate(path, number, offset)}: feature {proto.name!r}"
    shape = tuple(proto.dims)
    if proto.data_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        kind = "strings" if proto.data_type == TensorProto.STRING else "no element type"
        raise DataError(f"{where} has {kind}; expected numbers. {LEAVE_OUT}")
    if proto.data_location == TensorProto.EXTERNAL:
        raise DataError(f"{where} keeps its data in another file, which a shard cannot; store it inline.")
    if min(shape, default=0) < 0:
        raise DataError(f"{where} has the shape {shape}; axes cannot be negative. The file is corrupt.")
    if proto.data_type in PLAIN_TYPES and proto.HasField("raw_data"):
        dtype = onnx.helper.tensor_dtype_to_np_dtype(proto.data_type)
        raw, expected = proto.raw_data, math.prod(shape) * dtype.itemsize
        if len(raw) != expected:
            raise DataError(
                f"{where} of shape {shape} and type {dtype} needs {expected} bytes, but has {len(raw)}. The file is "
                "corrupt: copy or pack it again, or set data.skip_corrupt_files to leave it out."
            )
        stored = dtype.newbyteorder("<")
        return np.frombuffer(raw, dtype if stored == dtype else stored).reshape(shape).astype(dtype, copy=False)
    try:
        return np.asarray(numpy_helper.to_array(proto))
    except Exception as error:
        # numpy_helper raises whatever its parts raise: TypeError, ValueError, OverflowError, KeyError, ...
        raise DataError(
            f"{where} of shape {shape} and element type {proto.data_type} cannot be unpacked: {error}. The file is "
            "corrupt: copy or pack it again, or set data.skip_corrupt_files to leave it out."
        ) from error


def read_samples(path: str | os.PathLike[str]) -> Iterator[dict[str, np.ndarray]]:
    """Reads a shard sample by sample, with the names of the file; of a repeated name the last counts.

    Raises:
        DataError: the file is missing, cut off or corrupt.
    """
    index = index_shard(path)
    try:
        with open_binary(index.path) as file:
            for number in range(index.sample_count):
                offset, end = int(index.offsets[number]), int(index.offsets[number + 1])
                buffer = memoryview(bytearray(end - offset - 4))
                read_exactly(file, buffer, index.path, offset + 4)
                sample = {}
                for here, data in split_sample(buffer, index.path, number, offset):
                    proto = parse_feature(data, index.path, number, here)
                    sample[proto.name] = tensor_to_array(proto, index.path, number, here)
                yield sample
    except OSError as error:
        raise unreadable(index.path, error) from error

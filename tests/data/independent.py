"""A writer and a reader of shards straight from the format's description: struct and protobuf's wire rules, no onnx."""

import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FLOAT, INT32, INT64 = 1, 6, 7  # onnx.TensorProto.DataType
NUMPY = {FLOAT: "<f4", INT32: "<i4", INT64: "<i8"}
ONNX = {np.dtype(code): number for number, code in NUMPY.items()}


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


def field(number: int, payload: bytes) -> bytes:
    return varint(number * 8 + 2) + varint(len(payload)) + payload


def tensor(name: str, array: Array) -> bytes:
    """TensorProto: dims = 1, data_type = 2, name = 8, raw_data = 9."""
    dims = b"".join(varint(1 * 8) + varint(axis) for axis in array.shape)
    kind = varint(2 * 8) + varint(ONNX[array.dtype])
    return dims + kind + field(8, name.encode()) + field(9, array.tobytes())


def sample(features: Iterable[tuple[str, Array]]) -> bytes:
    """A sample from (name, array) pairs; a name may repeat."""
    tensors = [tensor(name, array) for name, array in features]
    body = b"".join(struct.pack("<I", len(each)) + each for each in tensors)
    return struct.pack("<I", len(body)) + body


def write(path: Path, samples: Iterable[Mapping[str, Array]]) -> None:
    path.write_bytes(b"".join(sample(each.items()) for each in samples))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    position = 0

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value += byte % 128 << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(message):
        tag = number()
        if tag % 8 == 0:
            yield tag // 8, number()
        else:
            assert tag % 8 == 2
            size = number()
            position += size
            yield tag // 8, message[position - size : position]


def read(path: Path) -> list[list[tuple[str, Array]]]:
    """Samples as lists of (name, array)."""
    data, position, samples = path.read_bytes(), 0, []
    while position < len(data):
        (size,) = struct.unpack_from("<I", data, position)
        end, features = position + 4 + size, []
        position += 4
        while position < end:
            (size,) = struct.unpack_from("<I", data, position)
            fields = list(_fields(data[position + 4 : position + 4 + size]))
            shape = [value for number, value in fields if number == 1]
            values = dict(fields)
            features.append((values[8].decode(), np.frombuffer(values[9], NUMPY[values[2]]).reshape(shape)))
            position += 4 + size
        assert position == end
        samples.append(features)
    return samples

"""An ONNX file with values put into it, by the wire format of protobuf alone, since onnx may not be installed.

https://protobuf.dev/programming-guides/encoding and onnx.proto have the numbers of the fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from onward_device.bundle import Array, BundleError

_GRAPH = 7
_INITIALIZER, _INPUT = 5, 11
_VALUE_NAME = 1
_DIMS, _TYPE, _TENSOR_NAME, _RAW, _EXTERNAL, _LOCATION = 1, 2, 8, 9, 13, 14
_TYPES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9, "float16": 10,
    "float64": 11, "uint32": 12, "uint64": 13,
}  # fmt: skip
_LARGEST_BYTES = (1 << 31) - 1


def with_values(model: bytes, values: Mapping[str, Array], folder: Path) -> bytes:
    """A model whose inputs of these names are initializers, and whose external tensors are inside.

    Args:
        model: an ONNX file.
        values: by the name of an input.
        folder: of the files that its tensors are in.

    Raises:
        BundleError: it is larger than an ONNX file can be.
    """
    parts = []
    for number, value, field in _fields(model):
        parts.append(_message(_GRAPH, _graph(value, values, folder)) if number == _GRAPH else field)
    content = b"".join(parts)
    if len(content) > _LARGEST_BYTES:
        raise BundleError(
            f"the model takes {len(content):,} bytes, and an ONNX file ends at 2 GiB. Save the state, and run "
            "`onward export MODEL --device-state`."
        )
    return content


def _graph(graph: bytes, values: Mapping[str, Array], folder: Path) -> bytes:
    parts = []
    for number, value, field in _fields(graph):
        if number == _INITIALIZER:
            parts.append(_message(_INITIALIZER, _inside(value, folder)))
        elif number != _INPUT or _text(value, _VALUE_NAME) not in values:
            parts.append(field)
    for name, array in values.items():
        dims = b"".join(_tag(_DIMS, 0) + _varint(size) for size in array.shape)
        kind = _tag(_TYPE, 0) + _varint(_TYPES[str(array.dtype)])
        tensor = dims + kind + _message(_TENSOR_NAME, name.encode()) + _message(_RAW, array.tobytes())
        parts.append(_message(_INITIALIZER, tensor))
    return b"".join(parts)


def _inside(tensor: bytes, folder: Path) -> bytes:
    """A tensor whose bytes are in the message itself."""
    fields = list(_fields(tensor))
    entries = [value for number, value, _ in fields if number == _EXTERNAL]
    if not entries:
        return tensor
    about = {_text(entry, 1): _text(entry, 2) for entry in entries}
    with (folder / Path(about["location"]).name).open("rb") as file:
        file.seek(int(about.get("offset", "0")))
        raw = file.read(int(about["length"])) if "length" in about else file.read()
    kept = b"".join(field for number, _, field in fields if number not in (_EXTERNAL, _LOCATION))
    return kept + _message(_RAW, raw)


def _text(message: bytes, wanted: int) -> str:
    return next((value.decode() for number, value, _ in _fields(message) if number == wanted), "")


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Number, content, and all bytes of every field of a message; the content of numbers is empty."""
    place = 0
    while place < len(message):
        start = place
        tag, place = _read_varint(message, place)
        number, wire = tag >> 3, tag & 7
        content = b""
        if wire == 0:
            _, place = _read_varint(message, place)
        elif wire == 2:
            length, place = _read_varint(message, place)
            content = message[place : place + length]
            place += length
        else:
            place += {1: 8, 5: 4}[wire]
        yield number, content, message[start:place]


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = message[place]
        found |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return found, place


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _tag(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _message(number: int, content: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(content)) + content

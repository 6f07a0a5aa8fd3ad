"""Writes an ONNX file tensor by tensor, so that a model whose weights are elsewhere is never in memory in full.

The bytes are those that protobuf itself would write: fields in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir
from google.protobuf.message import Message

from onward.graph.reading.model_file import restore_kept_fields

STREAMED_ABOVE_BYTES = 4096
"""Smaller tensors are part of what is written at once."""


def write_streamed(model: ir.Model, path: Path) -> None:
    """Writes `model` to one file with all weights in it, each fetched when it is its turn. OSError goes through.

    Args:
        model: unchanged afterwards.
        path: of the file.
    """
    streamed = {
        name: tensor
        for name, value in model.graph.initializers.items()
        if (tensor := value.const_value) is not None
        and tensor.dtype is not ir.DataType.STRING
        and tensor.nbytes > STREAMED_ABOVE_BYTES
    }
    proto = _without_values(model, streamed)
    restore_kept_fields(proto, model)
    with open(path, "wb") as stream:
        _write_model(stream, proto, streamed)


def _without_values(model: ir.Model, streamed: Mapping[str, ir.TensorProtocol]) -> onnx.ModelProto:
    """The model as a message in which the streamed tensors have everything but their values."""
    values = model.graph.initializers
    try:
        for name, tensor in streamed.items():
            values[name].const_value = ir.ExternalTensor(
                "streamed",
                0,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=str(tensor.name),
                doc_string=tensor.doc_string,
                metadata_props=dict(tensor.metadata_props),
            )
        return ir.to_proto(model)
    finally:
        for name, tensor in streamed.items():
            values[name].const_value = tensor


def _write_model(stream: BinaryIO, proto: onnx.ModelProto, streamed: Mapping[str, ir.TensorProtocol]) -> None:
    """The model's fields around its graph, the graph's around its initializers, theirs around the values."""
    initializers: list[tuple[bytes, bytes, ir.TensorProtocol | None]] = []
    for initializer in proto.graph.initializer:
        values = streamed.get(initializer.name)
        if values is None:
            initializers.append((initializer.SerializeToString(), b"", None))
        else:
            initializer.ClearField("external_data")
            initializer.ClearField("data_location")
            before, after = _split(initializer, "raw_data")
            initializers.append((before + _start(initializer, "raw_data", values.nbytes), after, values))
    sizes = [
        len(before) + (0 if values is None else values.nbytes) + len(after) for before, after, values in initializers
    ]
    starts = [_start(proto.graph, "initializer", size) for size in sizes]
    graph_before, graph_after = _split(proto.graph, "initializer")
    graph_bytes = len(graph_before) + sum(map(len, starts)) + sum(sizes) + len(graph_after)
    before, after = _split(proto, "graph")
    stream.write(before + _start(proto, "graph", graph_bytes) + graph_before)
    for start, (head, tail, values) in zip(starts, initializers, strict=True):
        stream.write(start + head)
        if values is not None:
            content = values.tobytes()
            if len(content) != values.nbytes:
                raise ValueError(f"{values.name!r} has {len(content)} bytes; expected {values.nbytes}.")
            stream.write(content)
        stream.write(tail)
    stream.write(graph_after + after)


def _split(message: Message, field: str) -> tuple[bytes, bytes]:
    """The bytes of the fields before `field` and of those after it, in the order of their numbers."""
    number = message.DESCRIPTOR.fields_by_name[field].number
    parts = []
    for keep_before in (True, False):
        part = type(message)()
        for descriptor, value in message.ListFields():
            if descriptor.number != number and (descriptor.number < number) is keep_before:
                _copy_field(part, descriptor.name, value)
        parts.append(part.SerializeToString())
    return parts[0], parts[1]


def _copy_field(target: Message, name: str, value: object) -> None:
    if isinstance(value, Message):
        getattr(target, name).CopyFrom(value)
    elif hasattr(value, "MergeFrom"):
        getattr(target, name).MergeFrom(value)
    else:
        setattr(target, name, value)


def _start(message: Message, field: str, size_bytes: int) -> bytes:
    """What is before the bytes of a field of known length: its number with wire type 2, and the length."""
    return _varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | 2) + _varint(size_bytes)


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])

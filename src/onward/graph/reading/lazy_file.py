"""An ONNX file read without its weights: what is stored inside of the file stays there until it is used.

protobuf would hold the file's bytes and the parsed message, twice the model, before anything else could be done.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from onward.graph.reading.model_file import model_from_proto, read_model
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.untrusted_files import open_regular

LEFT_ABOVE_BYTES = 4096
"""Smaller tensors are read with the rest."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number


def read_model_lazily(path: Path, limits: Limits = DEFAULT_LIMITS) -> ir.Model:
    """What `read_model` gives for a file, its large initializers `LazyTensor`s that read the file at each use.

    The file must stay as it is while the model is used. A file of another form than binary, or a damaged one, is read
    by `read_model`, and raises as it does.
    """
    try:
        # Hard links are refused for external data, which the weights are taken for on the way.
        proto = _parse_without_values(path) if path.stat().st_nlink == 1 else None
    except (OSError, ValueError, IndexError, DecodeError):
        proto = None
    if proto is None or not proto.HasField("graph"):
        return read_model(path, limits)
    model = model_from_proto(proto, f"model {str(path)!r}", path.absolute().parent, limits)
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.location == path.name:
            value.const_value = _lazy(path, name, tensor)
    return model


def _lazy(path: Path, name: str, tensor: ir.ExternalTensor) -> ir.LazyTensor:
    dtype, shape = tensor.dtype, tuple(int(size) for size in tensor.shape.numpy())
    offset, length = tensor.offset or 0, tensor.length or 0

    def load() -> ir.TensorProtocol:
        with open_regular(path) as stream:
            stream.seek(offset)
            content = stream.read(length)
        proto = onnx.TensorProto(name=name, data_type=int(dtype), dims=shape, raw_data=content)
        return ir.serde.TensorProtoTensor(proto)

    return ir.LazyTensor(
        load,
        dtype=dtype,
        shape=ir.Shape(shape),
        name=name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def _parse_without_values(path: Path) -> onnx.ModelProto:
    """The message of a file; large initializers are external, in the file itself."""
    with open_regular(path) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        proto = onnx.ModelProto()
        for number, start, value, end in _fields(content, 0, len(content)):
            if number != _GRAPH:
                proto.MergeFromString(content[start:end])
                continue
            graph = onnx.GraphProto()
            for inner, inner_start, inner_value, inner_end in _fields(content, value, end):
                if inner == _INITIALIZER:
                    graph.initializer.append(_tensor(content, inner_value, inner_end, path.name))
                else:
                    graph.MergeFromString(content[inner_start:inner_end])
            proto.graph.MergeFrom(graph)
        return proto


def _tensor(content: mmap.mmap, start: int, end: int, location: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto()
    for number, field_start, value, field_end in _fields(content, start, end):
        if number == _RAW_DATA and field_end - value > LEFT_ABOVE_BYTES:
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, text in (("location", location), ("offset", str(value)), ("length", str(field_end - value))):
                tensor.external_data.add(key=key, value=text)
        else:
            tensor.MergeFromString(content[field_start:field_end])
    return tensor


def _fields(content: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Of every field of a message: its number, where it starts, where its value starts, and where it ends."""
    while start < end:
        key, value = _varint(content, start)
        kind = key & 7
        if kind == _VARINT:
            _, stop = _varint(content, value)
        elif kind == _BYTES:
            size, value = _varint(content, value)
            stop = value + size
        elif kind in (_FIXED64, _FIXED32):
            stop = value + (8 if kind == _FIXED64 else 4)
        else:
            raise ValueError(f"a field of the unknown wire type {kind}")
        if stop > end:
            raise ValueError("a field reaches beyond the end of its message")
        yield key >> 3, start, value, stop
        start = stop


def _varint(content: mmap.mmap, start: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    number = shift = 0
    while True:
        byte = content[start]
        number |= (byte & 0x7F) << shift
        start, shift = start + 1, shift + 7
        if not byte & 0x80:
            return number, start
        if shift > 63:
            raise ValueError("a number of more than 64 bits")

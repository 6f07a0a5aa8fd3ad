"""Whether every stored tensor is really there: inline bytes of the right number, external files within the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.iteration import every_node
from onward.graph.nodes.structure import label
from onward.untrusted_files import RefusedFile, path_inside

LARGEST_ELEMENT_COUNT = 2**62
"""More elements than any memory holds; sizes above it come from broken or hostile files."""

_TYPED_FIELD = {
    ir.DataType.FLOAT: "float_data",
    ir.DataType.DOUBLE: "double_data",
    ir.DataType.INT64: "int64_data",
    ir.DataType.UINT32: "uint64_data",
    ir.DataType.UINT64: "uint64_data",
    **dict.fromkeys(
        (
            ir.DataType.INT32, ir.DataType.INT16, ir.DataType.INT8, ir.DataType.UINT16, ir.DataType.UINT8,
            ir.DataType.BOOL, ir.DataType.FLOAT16, ir.DataType.BFLOAT16,
        ),
        "int32_data",
    ),
}  # fmt: skip
"""Element type -> field of a TensorProto that holds one entry an element, where the bytes are not in `raw_data`."""


def check_tensors(model: ir.Model, where: str, folder: Path | None) -> None:
    """Checks initializers and tensor attributes, nested graphs and functions included, without reading the data.

    Args:
        model: the model.
        where: what the model is called in errors.
        folder: of the model, which external data may not leave; None: it has none.

    Raises:
        ModelError: naming the tensor, the file and the bytes that are missing.
    """
    for name, tensor in stored_tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            _check_external(tensor, name, folder, where)
        elif isinstance(tensor, ir.serde.TensorProtoTensor):
            _check_inline(tensor, name, where)
        elif isinstance(tensor, ir.StringTensor):
            count, stored = _element_count(tensor, name, where), len(tensor.raw)
            if stored != count:
                shape = [int(size) for size in tensor.shape.numpy()]
                raise ModelError(
                    f"{where}: {name} (shape {shape}, STRING) needs {count} elements; the file holds {stored}."
                )


def close_file(tensor: ir.TensorProtocol | None) -> None:
    """Closes the file that an external tensor has mapped, so that pages that were read can go; it can be read again."""
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()


def stored_tensors(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol]]:
    """Every initializer and tensor attribute, nested graphs and functions included, with words for its place."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for one in (graph, *graph.subgraphs()):
            for name, value in one.initializers.items():
                if value.const_value is not None:
                    yield f"initializer {name!r}", value.const_value
        for node in every_node(graph):
            for attribute in node.attributes.values():
                place = f"attribute {attribute.name!r} of {label(node)}"
                if attribute.is_ref():
                    continue
                if attribute.type is ir.AttributeType.TENSOR:
                    yield place, attribute.as_tensor()
                elif attribute.type is ir.AttributeType.TENSORS:
                    yield from ((place, tensor) for tensor in attribute.as_tensors())


def _element_count(tensor: ir.TensorProtocol, name: str, where: str) -> int:
    sizes = [int(size) for size in tensor.shape.numpy()]
    count = 1
    for size in sizes:
        count *= size
    if min(sizes, default=0) < 0 or count > LARGEST_ELEMENT_COUNT:
        raise ModelError(f"{where}: {name} has the impossible shape {sizes}.")
    return count


def _check_inline(tensor: ir.serde.TensorProtoTensor, name: str, where: str) -> None:
    count = _element_count(tensor, name, where)
    proto: onnx.TensorProto = tensor.raw
    dtype = ir.DataType(proto.data_type)
    shape = list(proto.dims)
    if dtype is ir.DataType.UNDEFINED:
        raise ModelError(
            f"{where}: {name} (shape {shape}) has the element type {dtype.name}, which raw bytes cannot hold."
        )
    if proto.HasField("raw_data"):
        stored, expected, unit = len(proto.raw_data), (count * dtype.bitwidth + 7) // 8, "bytes"
    elif dtype in _TYPED_FIELD:
        stored, expected, unit = len(getattr(proto, _TYPED_FIELD[dtype])), count, "elements"
    else:
        try:
            tensor.numpy()
        except Exception as error:
            raise ModelError(f"{where}: {name} (shape {shape}, {dtype.name}) cannot be read: {error}") from error
        return
    if stored != expected:
        raise ModelError(
            f"{where}: {name} (shape {shape}, {dtype.name}) needs {expected} {unit}; the file holds {stored}."
        )


def _check_external(tensor: ir.ExternalTensor, name: str, folder: Path | None, where: str) -> None:
    location = str(tensor.location)
    if folder is None:
        raise ModelError(
            f"{where}: {name} is stored in the file {location!r}, but a ModelProto has no folder; "
            "give the model's path, or load its external data first."
        )
    try:
        path = path_inside(tensor.base_dir or folder, location)
    except RefusedFile as error:
        raise ModelError(f"{where}: {name} cannot be read from its external data: {error}") from error
    if not path.is_file():
        what = "is no regular file" if path.exists() else "is missing"
        raise ModelError(f"{where}: {name} is stored in {location!r}, which {what}; copy it next to the model.")
    status = path.stat()
    if status.st_nlink > 1:
        raise ModelError(
            f"{where}: {name} is stored in {location!r}, which has {status.st_nlink} hard links and may so belong "
            "to something outside of the model's folder; copy the file."
        )
    _check_range(tensor, name, location, status.st_size, where)


def _check_range(tensor: ir.ExternalTensor, name: str, location: str, file_bytes: int, where: str) -> None:
    if tensor.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        raise ModelError(f"{where}: {name} has the element type {tensor.dtype.name}, which external data cannot hold.")
    expected = (_element_count(tensor, name, where) * tensor.dtype.bitwidth + 7) // 8
    offset = tensor.offset or 0
    if tensor.length is not None and tensor.length != expected:
        raise ModelError(
            f"{where}: {name} (shape {[int(s) for s in tensor.shape.numpy()]}, {tensor.dtype.name}) needs {expected} "
            f"bytes, but is said to take {tensor.length} in {location!r}."
        )
    if offset < 0 or offset + expected > file_bytes:
        raise ModelError(
            f"{where}: {name} needs bytes {offset} to {offset + expected} of {location!r}, which has only "
            f"{file_bytes}; the file is cut off."
        )

"""The tensors of a device bundle's graphs and first state: in one file that all graphs read, or inside the graphs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onward.device.layout import DeviceGraphs
from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter

WEIGHTS = "weights.bin"
_SMALLEST_SHARED_BYTES = 1024
"""Smaller constants stay in the graphs, where runtimes compute with them before they run."""

_MOST_BYTES_OF_SIZES = 1 << 16
"""Of lists of integers, as `Split` and `Reshape` read: runtimes infer shapes by them before they read other files."""

_PAGE_BYTES = 4096
"""Tensors begin at a page, so that runtimes map them into memory."""

_LARGEST_BYTES = (1 << 31) - 1
"""Of an ONNX file: protobuf's limit."""

_START = "start/"
"""Begins the names of initializers that are first values of the state."""


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes are: in the order of rows, little-endian."""

    file: str
    offset: int
    length: int


def save_with_shared_weights(graphs: DeviceGraphs, folder: Path) -> dict[str, Place]:
    """Writes the graphs and one file that all of them read.

    Returns:
        Where the first values of the state are, by name; those that are zeros or one number are nowhere.
    """
    with _SharedWeights(folder) as shared:
        starts = {one.name: shared.add(one.start) for one in graphs.state if one.start is not None and one.shape}
        for name, model in graphs.models.items():
            for value in model.graph.initializers.values():
                shared.move(value)
            ir.save(model, folder / f"{name}.onnx")
    return starts


def save_with_weights_inside(graphs: DeviceGraphs, folder: Path) -> dict[str, Place]:
    """Writes the graphs with their tensors inside; that of a pass also holds the first values of the state.

    These are initializers that no node reads. As default values of inputs they would be ignored silently by runtimes
    that take no other values for such inputs, onnxruntime-node among them.

    Returns:
        Where the first values of the state are, by name; those that are zeros or one number are nowhere.

    Raises:
        ModelError: a graph with its tensors is larger than an ONNX file can be.
    """
    first = "step" if "step" in graphs.models else "train"
    names = _add_first_values(graphs, graphs.models[first])
    for name, model in graphs.models.items():
        for value in model.graph.initializers.values():
            _move_inside(value)
        held = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
        if held > _LARGEST_BYTES:
            raise ModelError(
                f"the tensors of {name}.onnx take {held:,} bytes, and an ONNX file ends at 2 GiB. Leave out "
                "--weights-inside: they go into a file next to the graphs."
            )
        content = ir.to_proto(model).SerializeToString()
        (folder / f"{name}.onnx").write_bytes(content)
        if name == first:
            places = _places_inside(model, content, f"{name}.onnx")
    return {name: places[initializer] for name, initializer in names.items()}


def _add_first_values(graphs: DeviceGraphs, model: ir.Model) -> dict[str, str]:
    """The initializer of each tensor of the state, by name; equal ones are one."""
    writer, held, found = NodeWriter(model, _START), dict[bytes, str](), dict[str, str]()
    for one in graphs.state:
        if one.start is None or not one.shape:
            continue
        array = np.ascontiguousarray(one.start.numpy())
        digest = hashlib.sha256(array.tobytes()).digest()
        if digest not in held:
            held[digest] = str(writer.constant(array, one.name, array.dtype).name)
        found[one.name] = held[digest]
    return found


def _places_inside(model: ir.Model, content: bytes, file: str) -> dict[str, Place]:
    """The initializers of a graph whose bytes are `content`, in the same order, found by what they hold."""
    places, end = dict[str, Place](), 0
    for value in model.graph.initializers.values():
        if str(value.name).startswith(_START):
            assert value.const_value is not None
            data = value.const_value.tobytes()
            offset = content.index(data, end)
            end = offset + len(data)
            places[str(value.name)] = Place(file, offset, len(data))
    return places


def _move_inside(value: ir.Value) -> None:
    """Lets an initializer hold its tensor itself."""
    tensor = value.const_value
    if isinstance(tensor, ir.ExternalTensor):
        value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)


def _stays_inside(tensor: ir.TensorProtocol) -> bool:
    """Whether a constant is no matter of the shared file."""
    is_sizes = tensor.dtype is ir.DataType.INT64 and len(tensor.shape) == 1
    fewest = _MOST_BYTES_OF_SIZES if is_sizes else _SMALLEST_SHARED_BYTES
    return tensor.dtype is ir.DataType.STRING or tensor.nbytes < fewest


class _SharedWeights:
    """The file that all graphs read their tensors from; equal bytes are written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = (folder / WEIGHTS).open("wb")
        self._places: dict[bytes, Place] = {}

    def __enter__(self) -> _SharedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, tensor: ir.TensorProtocol) -> Place:
        """Where a tensor is in the file."""
        data = np.ascontiguousarray(tensor.numpy()).tobytes()
        digest = hashlib.sha256(data).digest()
        if digest not in self._places:
            start = self._file.tell()
            self._file.write(b"\0" * (-start % (_PAGE_BYTES if len(data) >= _PAGE_BYTES * 16 else 64)))
            self._places[digest] = Place(WEIGHTS, self._file.tell(), len(data))
            self._file.write(data)
        return self._places[digest]

    def move(self, value: ir.Value) -> None:
        """Lets an initializer read its tensor from the file, where it is large."""
        tensor = value.const_value
        if tensor is None or _stays_inside(tensor):
            _move_inside(value)
            return
        place = self.add(tensor)
        value.const_value = ir.ExternalTensor(
            place.file,
            place.offset,
            place.length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=str(value.name),
            base_dir=self._folder,
        )

"""Maps as types of values, for which onnx-ir has no class: set aside when a model is read, restored when it is written.

`ZipMap`, which ends the classifiers that scikit-learn's and LightGBM's converters write, gives a sequence of maps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx

MAP_TYPES = "onward.map_types"
"""Key in `ir.Model.meta`: name of a value -> its type, a map or a sequence of maps."""

MapTypes = Mapping[str, onnx.TypeProto]
"""As under `MAP_TYPES`."""


def without_map_types(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, MapTypes]:
    """The model with no type where it declares a map, and those types; a model without any is returned itself."""
    if not any(holds_map(value.type) for value in _declared(proto)):
        return proto, {}
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    types: dict[str, onnx.TypeProto] = {}
    for value in _declared(copy):
        if holds_map(value.type):
            kept = types[value.name] = onnx.TypeProto()
            kept.CopyFrom(value.type)
            value.ClearField("type")
    return copy, types


def restore_map_types(proto: onnx.ModelProto, types: MapTypes) -> None:
    """Declares the types that `without_map_types` set aside, in place."""
    declared = set()
    for value in _declared(proto):
        if value.name in types and value.type.WhichOneof("value") is None:
            value.type.CopyFrom(types[value.name])
            declared.add(value.name)
    # onnx-ir writes no `value_info` of a value without a type.
    for name, kept in types.items():
        if name not in declared:
            proto.graph.value_info.add(name=name, type=kept)


def holds_map(kind: onnx.TypeProto) -> bool:
    """Whether a type is a map, or a sequence or optional of one."""
    name = kind.WhichOneof("value")
    if name in ("sequence_type", "optional_type"):
        return holds_map(getattr(kind, name).elem_type)
    return bool(name == "map_type")


def describe_map(kind: onnx.TypeProto) -> str:
    """A type that holds a map, in words: `sequence of maps int64 -> float32`."""
    name = kind.WhichOneof("value")
    if name in ("sequence_type", "optional_type"):
        inner = describe_map(getattr(kind, name).elem_type)
        return f"sequence of {inner.replace('map ', 'maps ', 1)}" if name == "sequence_type" else f"optional {inner}"
    value = kind.map_type.value_type
    return f"map {_element(kind.map_type.key_type)} -> {_element(value.tensor_type.elem_type)}"


def _element(number: int) -> str:
    name = str(onnx.TensorProto.DataType.Name(number)).lower() if number else "?"
    return "float32" if name == "float" else name


def _declared(proto: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    """Every value that the main graph or a graph nested in it declares."""
    graphs = [proto.graph]
    while graphs:
        graph = graphs.pop()
        yield from (*graph.input, *graph.output, *graph.value_info)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    graphs.append(attribute.g)
                graphs.extend(attribute.graphs)

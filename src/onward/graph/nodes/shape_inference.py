"""ONNX's own shape inference on a model of any size: it sees small constants, which may be shapes, and no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from onward.graph.nodes.budget import largest_value
from onward.graph.nodes.map_types import MAP_TYPES, holds_map
from onward.graph.nodes.structure import ML_DOMAIN

LARGEST_PROPAGATED = 10_000
"""Numbers of a value that shape inference computes; a shape has at most one for every axis."""

LARGEST_SEEN_BYTES = 1024
"""Initializers up to this size may hold shapes; larger ones are weights."""

_OF_PROPAGATION = "Invalid rank for "
"""onnx computes the numbers of small tensors as if each were a list: of shapes (2, 1) and (63) it says (2) vs (63)."""


class InferredValues(Mapping[str, ir.Value]):
    """The values that nodes of a main graph compute, by name; each is decoded when it is asked for.

    Args:
        graph: with the types and shapes that inference found.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._declared = {declared.name: declared for declared in (*graph.value_info, *graph.output)}
        self._values: dict[str, ir.Value | None] = {name: None for node in graph.node for name in node.output if name}

    def __getitem__(self, name: str) -> ir.Value:
        value = self._values[name]
        if value is None:
            value = self._values[name] = self._decoded(name)
        return value

    def _decoded(self, name: str) -> ir.Value:
        declared = self._declared.get(name)
        if declared is None or holds_map(declared.type):
            return ir.Value(name=name)
        return ir.serde.deserialize_value_info_proto(declared, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def infer(model: ir.Model, *, strict: bool) -> onnx.ModelProto:
    """The model as a message without its large initializers, with every type and shape that follows from the rest.

    Raises:
        Exception: whatever onnx finds contradictory; if not `strict`, only what it cannot continue with.
    """
    if any(_ends_the_process(node, model) for node in model.graph):
        raise ValueError("onnx's shape inference of LabelEncoder-1 does not survive an input whose type is not known")
    types = model.meta.get(MAP_TYPES) or {}
    if model.functions:
        model = model.clone()
        passes.InlinePass()(model)
    # Numbers beyond any shape are not propagated: a chain of 40 Concats would have 2^40 of them.
    propagates = largest_value(model.graph)[1] <= LARGEST_PROPAGATED
    proto = _without_weights(model)
    for value in proto.graph.input:
        if value.name in types:  # onnx's inference of DictVectorizer ends the process on an input without a type
            value.type.CopyFrom(types[value.name])
    try:
        return onnx.shape_inference.infer_shapes(proto, check_type=strict, strict_mode=strict, data_prop=propagates)
    except onnx.shape_inference.InferenceError as error:
        if not propagates or _OF_PROPAGATION not in str(error):
            raise
    return onnx.shape_inference.infer_shapes(proto, check_type=strict, strict_mode=strict, data_prop=False)


def _without_weights(model: ir.Model) -> onnx.ModelProto:
    """A message of a model that declares its large initializers as inputs."""
    graph = model.graph
    inputs, small = list(graph.inputs), list[ir.Value]()
    for value in graph.initializers.values():
        if value.const_value is None or value.const_value.nbytes <= LARGEST_SEEN_BYTES:
            small.append(value)
        elif not value.is_graph_input():
            inputs.append(value)
    view = ir.GraphView(inputs, graph.outputs, nodes=graph, initializers=small, name=graph.name)
    proto = onnx.ModelProto(ir_version=model.ir_version)
    for domain, version in model.opset_imports.items():
        proto.opset_import.add(domain=domain, version=version)
    ir.serde.serialize_graph_into(proto.graph, view, model_ir_version=model.ir_version)  # type: ignore[arg-type]
    return proto


def _ends_the_process(node: ir.Node, model: ir.Model) -> bool:
    if (node.domain, node.op_type) != (ML_DOMAIN, "LabelEncoder") or model.opset_imports.get(ML_DOMAIN, 1) > 1:
        return False
    return node.inputs[0] is None or node.inputs[0].type is None


def contradiction(model: ir.Model) -> str | None:
    """What strict shape inference objects to in a model, if anything."""
    try:
        infer(model, strict=True)
    except Exception as error:
        return " ".join(str(error).split())
    return None


def inferred_values(model: ir.Model) -> Mapping[str, ir.Value]:
    """The values of the main graph by name, with inferred types and shapes; empty where inference fails."""
    try:
        return InferredValues(infer(model, strict=False).graph)
    except Exception:
        return {}

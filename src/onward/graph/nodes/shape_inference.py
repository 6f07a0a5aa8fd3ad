"""ONNX's own shape inference on a model of any size: it sees small constants, which may be shapes, and no weights."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from onward.graph.nodes.budget import largest_value
from onward.graph.nodes.map_types import MAP_TYPES, without_map_types
from onward.graph.nodes.structure import ML_DOMAIN

LARGEST_PROPAGATED = 10_000
"""Numbers of a value that shape inference computes; a shape has at most one for every axis."""

LARGEST_SEEN_BYTES = 1024
"""Initializers up to this size may hold shapes; larger ones are weights."""


def infer(model: ir.Model, *, strict: bool) -> ir.Model:
    """A copy of the model without its large initializers, with every type and shape that follows from the rest.

    Raises:
        Exception: whatever onnx finds contradictory; if not `strict`, only what it cannot continue with.
    """
    if any(_ends_the_process(node, model) for node in model.graph):
        raise ValueError("onnx's shape inference of LabelEncoder-1 does not survive an input whose type is not known")
    copy = model.clone()
    if copy.functions:
        passes.InlinePass()(copy)
    # Numbers beyond any shape are not propagated: a chain of 40 Concats would have 2^40 of them.
    propagates = largest_value(copy.graph)[1] <= LARGEST_PROPAGATED
    for name, value in list(copy.graph.initializers.items()):
        if value.const_value is not None and value.const_value.nbytes > LARGEST_SEEN_BYTES:
            copy.graph.initializers.pop(name)
            if not value.is_graph_input():
                copy.graph.inputs.append(value)
    proto = ir.to_proto(copy)
    types = model.meta.get(MAP_TYPES) or {}
    for value in proto.graph.input:
        if value.name in types:  # onnx's inference of DictVectorizer ends the process on an input without a type
            value.type.CopyFrom(types[value.name])
    proto = onnx.shape_inference.infer_shapes(proto, check_type=strict, strict_mode=strict, data_prop=propagates)
    return ir.from_proto(without_map_types(proto)[0])


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


def inferred_values(model: ir.Model) -> dict[str, ir.Value]:
    """The values of the main graph by name, with inferred types and shapes; empty where inference fails."""
    try:
        graph = infer(model, strict=False).graph
    except Exception:
        return {}
    return {str(value.name): value for node in graph for value in node.outputs}

"""ONNX's own shape inference on a model of any size: it sees small constants, which may be shapes, and no weights."""

from __future__ import annotations

import onnx
import onnx_ir as ir

LARGEST_SEEN_BYTES = 1024
"""Initializers up to this size may hold shapes; larger ones are weights."""


def infer(model: ir.Model, *, strict: bool) -> ir.Model:
    """A copy of the model without its large initializers, with every type and shape that follows from the rest.

    Raises:
        Exception: whatever onnx finds contradictory; if not `strict`, only what it cannot go on with.
    """
    copy = model.clone()
    for name, value in list(copy.graph.initializers.items()):
        if value.const_value is not None and value.const_value.nbytes > LARGEST_SEEN_BYTES:
            copy.graph.initializers.pop(name)
            if not value.is_graph_input():
                copy.graph.inputs.append(value)
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(copy), check_type=strict, strict_mode=strict, data_prop=True)
    return ir.from_proto(proto)


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

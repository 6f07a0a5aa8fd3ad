"""Sums at indices in float32: ONNX Runtime's CPU kernel of `ScatterElements` adds no float16."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16


def widen_scatters(model: ir.Model) -> int:
    """Casts what `ScatterElements` and `ScatterND` combine in float16 to float32, and the result back.

    Returns:
        How many there were.
    """
    writer, count = NodeWriter(model, "scatters/"), 0
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        reduction = node.attributes.get("reduction")
        result = node.outputs[0]
        if node.op_type not in ("ScatterElements", "ScatterND") or result.dtype is not FLOAT16:
            continue
        if reduction is None or reduction.as_string() == "none":
            continue
        assert node.graph is not None
        data, indices, updates = node.inputs
        wide = [writer.new_node("Cast", [one], "scatters/wide", {"to": FLOAT.value}) for one in (data, updates)]
        inputs = [wide[0].outputs[0], indices, wide[1].outputs[0]]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        added = writer.new_node(node.op_type, inputs, "scatters/added", attributes)
        narrow = writer.new_node("Cast", added.outputs, "scatters/narrow", {"to": FLOAT16.value})
        for new in (*wide, added):
            new.outputs[0].type = ir.TensorType(FLOAT)
        node.graph.insert_before(node, (*wide, added, narrow))
        writer.substitute(result, narrow.outputs[0])
        node.graph.remove(node, safe=True)
        count += 1
    return count

"""Products of transposed matrices as one operator each, which reads the matrix as it is."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter


def fold_transposes(model: ir.Model) -> int:
    """Replaces `MatMul` of two matrices, one or both of them transposed, by `Gemm` without the transposes.

    ONNX Runtime does so itself, but not where something is added to the product, as to gradients of tied weights.

    Returns:
        How many there were.
    """
    writer, count = NodeWriter(model, "products/"), 0
    for node in list(model.graph):
        if node.op_type != "MatMul" or any(value is None or len(value.shape or ()) != 2 for value in node.inputs):
            continue
        read = [_transposed(value) for value in node.inputs]
        if not any(read) or node.outputs[0].dtype is not ir.DataType.FLOAT:
            continue
        inputs = [old if new is None else new for old, new in zip(node.inputs, read, strict=True)]
        attributes = {name: 1 for name, new in zip(("transA", "transB"), read, strict=True) if new is not None}
        product = writer.new_node("Gemm", inputs, "products/gemm", attributes)
        model.graph.insert_before(node, product)
        writer.substitute(node.outputs[0], product.outputs[0])
        model.graph.remove(node, safe=True)
        count += 1
    return count


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """The matrix of which a value is the transpose, if it is one."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Transpose":
        return None
    order = node.attributes.get("perm")
    return node.inputs[0] if order is None or [*order.as_ints()] == [1, 0] else None

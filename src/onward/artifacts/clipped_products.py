"""Masks by arithmetic, a product that is clipped to 0 and 1, as one operator with one pass."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter


def write_masks_at_once(model: ir.Model) -> int:
    """Replaces `Clip(x * c, 0, 1)`, float32 with a constant c, by `HardSigmoid`, which is max(0, min(1, c * x)).

    Returns:
        How many there were.
    """
    writer, count = NodeWriter(model, "masks/"), 0
    for node in list(model.graph):
        product = node.inputs[0].producer() if node.op_type == "Clip" and node.inputs[0] is not None else None
        bounds = [_number(value) for value in node.inputs[1:]]
        if product is None or product.op_type != "Mul" or bounds != [0.0, 1.0]:
            continue
        x, factor = product.inputs[0], _number(product.inputs[1])
        if factor is None or node.outputs[0].dtype is not ir.DataType.FLOAT or _rank(product.inputs[1]) > _rank(x):
            continue
        mask = writer.new_node("HardSigmoid", [x], "masks/mask", {"alpha": factor, "beta": 0.0})
        model.graph.insert_before(node, mask)
        writer.substitute(node.outputs[0], mask.outputs[0])
        model.graph.remove(node, safe=True)
        count += 1
    return count


def _number(value: ir.Value | None) -> float | None:
    constant = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return None if constant is None or constant.size != 1 else float(constant.numpy().item())


def _rank(value: ir.Value | None) -> int:
    """The number of axes, 0 if it is not known."""
    return 0 if value is None or value.shape is None else len(value.shape)

"""Masks of clipped activations with few passes over their tensors."""

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


def write_clip_gradients_directly(model: ir.Model) -> int:
    """Replaces `Where(lower <= x <= upper, g, 0)` by a product of g and whether `Clip(x, lower, upper)` is x.

    torch writes the gradient of `clamp` so. ONNX Runtime takes twice as long for it, most of it for the choice. For
    models whose gradients are finite: a product of 0 and an infinite one is NaN.

    Returns:
        How many there were.
    """
    writer, count = NodeWriter(model, "clips/"), 0
    for node in list(model.graph):
        found = _clip_of_choice(node)
        if found is None:
            continue
        clip, gradient = found
        same = writer.new_node("Equal", [clip.inputs[0], clip.outputs[0]], "clips/inside")
        mask = writer.new_node("Cast", same.outputs, "clips/mask", {"to": ir.DataType.FLOAT})
        product = writer.new_node("Mul", [gradient, mask.outputs[0]], "clips/gradient")
        for new in (mask, product):
            new.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        model.graph.insert_before(node, (same, mask, product))
        writer.substitute(node.outputs[0], product.outputs[0])
        model.graph.remove(node, safe=True)
        count += 1
    return count


def _clip_of_choice(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The clipping whose gradient a node is, and what it chooses where nothing was clipped."""
    if node.op_type != "Where" or _number(node.inputs[2]) != 0.0 or node.outputs[0].dtype is not ir.DataType.FLOAT:
        return None
    condition, gradient = _producer(node.inputs[0], "And"), node.inputs[1]
    above, below = (
        (None, None)
        if condition is None
        else (_compared(condition, "GreaterOrEqual"), _compared(condition, "LessOrEqual"))
    )
    if gradient is None or above is None or below is None or above[0] is not below[0]:
        return None
    for clip in above[0].consumers():
        if clip.op_type == "Clip" and clip.inputs[0] is above[0]:
            bounds = [_number(value) for value in clip.inputs[1:]]
            if None not in bounds and bounds == [above[1], below[1]]:
                return clip, gradient
    return None


def _compared(condition: ir.Node, op_type: str) -> tuple[ir.Value, float | None] | None:
    """What one side of a condition compares, and with which number."""
    for value in condition.inputs:
        node = _producer(value, op_type)
        if node is not None and node.inputs[0] is not None:
            return node.inputs[0], _number(node.inputs[1])
    return None


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _number(value: ir.Value | None) -> float | None:
    constant = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return None if constant is None or constant.size != 1 else float(constant.numpy().item())


def _rank(value: ir.Value | None) -> int:
    """The number of axes, 0 if it is not known."""
    return 0 if value is None or value.shape is None else len(value.shape)

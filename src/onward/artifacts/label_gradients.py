"""The gradient of a cross-entropy over many classes, with three passes over the classes instead of seven."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter


def write_label_gradients_directly(model: ir.Model) -> int:
    """Replaces `g - exp(y) * sum(g)` by `exp(y) * -s` with s added at the labels, where g is zero elsewhere.

    torch writes the gradient of `log_softmax` so; g is a tensor of zeros into which the labels' gradients are
    scattered, and s, its sum over a row, is that gradient.

    Returns:
        How many there were.
    """
    writer, count = NodeWriter(model, "labels/"), 0
    for node in list(model.graph):
        found = _parts(node)
        if found is None:
            continue
        exponential, scatter, weight = found
        _, places, value = scatter.inputs
        axis = scatter.attributes["axis"].as_int()
        own = writer.new_node("Mul", [value, weight], "labels/gradient")
        negative = writer.new_node("Neg", own.outputs, "labels/negative")
        shares = writer.new_node("Mul", [exponential, negative.outputs[0]], "labels/shares")
        added = writer.new_node(
            "ScatterElements",
            [shares.outputs[0], places, own.outputs[0]],
            "labels/added",
            {"axis": axis, "reduction": "add"},
        )
        for new in (own, negative, shares, added):
            new.outputs[0].type = node.outputs[0].type
        model.graph.insert_before(node, (own, negative, shares, added))
        writer.substitute(node.outputs[0], added.outputs[0])
        model.graph.remove(node, safe=True)
        count += 1
    return count


def _parts(node: ir.Node) -> tuple[ir.Value, ir.Node, ir.Value] | None:
    """The exponential, the scattering and the weight of each row, if a `Sub` is such a gradient."""
    gradient = node.inputs[0] if node.op_type == "Sub" else None
    product = _producer(node.inputs[1], "Mul") if gradient is not None else None
    weighed = _producer(gradient, "Mul")
    if product is None or weighed is None:
        return None
    exponential, total = product.inputs
    summed = _producer(total, "ReduceSum")
    scatter, weight = _producer(weighed.inputs[0], "ScatterElements"), weighed.inputs[1]
    if summed is None or scatter is None or weight is None or summed.inputs[0] is not gradient:
        return None
    axis, axes = scatter.attributes["axis"].as_int(), summed.inputs[1]
    is_plain = "reduction" not in scatter.attributes or scatter.attributes["reduction"].as_string() == "none"
    is_over_classes = axes is not None and axes.const_value is not None and [*axes.const_value.numpy()] == [axis]
    is_one_a_row = all(_size(value, axis) == 1 for value in (scatter.inputs[1], weight))
    is_from_zeros = _is_zeros(scatter.inputs[0])
    if _producer(exponential, "Exp") is None or not (is_plain and is_over_classes and is_one_a_row and is_from_zeros):
        return None
    assert exponential is not None
    return exponential, scatter, weight


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _size(value: ir.Value | None, axis: int) -> object:
    return None if value is None or value.shape is None or len(value.shape) <= axis else value.shape[axis]


def _is_zeros(value: ir.Value | None) -> bool:
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "ConstantOfShape":
            filled = node.attributes.get("value")
            return filled is None or not filled.as_tensor().numpy().any()
        if node.op_type not in ("Expand", "Identity", "Cast"):
            return False
        value = node.inputs[0]
    return value is not None and value.const_value is not None and not value.const_value.numpy().any()

"""Convolutions without the biases of zeros that torch's exporter gives those that have none."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes.node_writer import remove_unread


def drop_zero_biases(model: ir.Model) -> int:
    """Removes biases that are constants of zeros: adding them takes a runtime a pass over the result.

    Returns:
        How many there were.
    """
    count = 0
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type not in ("Conv", "ConvTranspose") or len(node.inputs) < 3 or not _is_zero(node.inputs[2]):
            continue
        bias = node.inputs[2]
        node.resize_inputs(2)
        remove_unread(model.graph, bias)
        count += 1
    return count


def _is_zero(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    if producer is not None and producer.op_type == "Expand":
        value = producer.inputs[0]
    if value is None or value.is_graph_input():
        return False
    tensor = ir.convenience.get_const_tensor(value)
    return tensor is not None and not tensor.numpy().any()

"""Nodes that an export left in training mode, switched to inference: dropout and batch statistics."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def switch_to_inference(model: ir.Model) -> None:
    """Turns off, in place, what an export in training mode left on: dropout and batch statistics.

    Where the mode, or the statistics themselves, are inputs of the graph, the caller decides, and the node stays.
    """
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        parameters = () if graph is model.graph else tuple(graph.inputs)
        for node in list(ir.traversal.RecursiveGraphIterator(graph)):
            if node.domain != "":
                continue
            if node.op_type == "BatchNormalization":
                if all(_is_stored(value) or value in parameters for value in node.inputs[3:5]):
                    _use_running_statistics(node)
            elif node.op_type == "Dropout" and len(node.inputs) > 2 and _is_stored_and_true(node.inputs[2]):
                node.resize_inputs(2)


def _is_stored(value: ir.Value | None) -> bool:
    if value is None:
        return False
    node = value.producer()
    if node is None:
        return value.is_initializer()
    return node.domain == "" and node.op_type in ("Constant", "ConstantOfShape")


def _is_stored_and_true(value: ir.Value | None) -> bool:
    if value is None or not _is_stored(value):
        return False
    tensor = value.const_value
    node = value.producer()
    if tensor is None and node is not None and "value" in node.attributes:
        tensor = node.attributes["value"].as_tensor()
    return tensor is None or bool(np.all(tensor.numpy()))


def _use_running_statistics(node: ir.Node) -> None:
    """A node that trains says so by `training_mode`, before opset 14 by further outputs: the updated statistics."""
    if "training_mode" in node.attributes:
        if not node.attributes["training_mode"].as_int():
            return
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
    for index, output in enumerate(node.outputs[1:]):
        if output.uses() or output.is_graph_output():
            _repeat_statistic(node, node.inputs[3 + index % 2], output)
    node.resize_outputs(1)


def _repeat_statistic(node: ir.Node, statistic: ir.Value | None, output: ir.Value) -> None:
    """In inference the updated statistics are the running ones: what read the output reads a copy of them."""
    assert statistic is not None
    assert node.graph is not None
    copy = ir.node("Identity", [statistic], name=f"{node.name}_{output.name}")
    same = copy.outputs[0]
    same.type, same.shape = output.type, output.shape
    output.replace_all_uses_with(same, replace_graph_outputs=True)
    name, output.name = output.name, None
    same.name = name
    node.graph.insert_after(node, copy)

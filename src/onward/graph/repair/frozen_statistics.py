"""Batch normalization by the stored running statistics in training, too: for batches too small to have statistics.

Behind an `Identity` node, mean and variance are values like any other, which training neither replaces nor updates.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import free_name, value_names
from onward.graph.weights.choice import find_running_statistics

FROZEN_STATISTIC = "running statistic, frozen by training.freeze_batch_norm"


def freeze_running_statistics(model: ir.Model) -> tuple[str, ...]:
    """Lets every batch normalization of a model use its running statistics in training as in inference, in place.

    Returns:
        the names of the statistics.

    Raises:
        ModelError: the model stores none.
    """
    names = find_running_statistics(model.graph)
    if not names:
        raise ModelError(
            "training.freeze_batch_norm is set, but the model has no batch normalization with stored running "
            "statistics. Remove the field."
        )
    taken = value_names(model.graph)
    nodes = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if _reads(node, names)]
    for node in nodes:
        graph = node.graph
        assert graph is not None
        for index in (3, 4):
            value = node.inputs[index]
            if value is None or value.name not in names:
                continue
            copy = ir.Value(name=free_name(f"{value.name}_frozen", taken), shape=value.shape, type=value.type)
            graph.insert_before(node, ir.Node("", "Identity", [value], outputs=[copy], name=copy.name))
            node.replace_input_with(index, copy)
        if node.attributes.get("training_mode") is not None:
            # Exported in training mode: its further outputs are the statistics' next values, which nothing reads.
            node.attributes.pop("training_mode")
            node.resize_outputs(1)
    return names


def _reads(node: ir.Node, names: tuple[str, ...]) -> bool:
    return (
        node.domain == ""
        and node.op_type == "BatchNormalization"
        and any(value is not None and value.name in names for value in node.inputs[3:5])
        and not any(one.uses() or one.is_graph_output() for one in node.outputs[1:])
    )

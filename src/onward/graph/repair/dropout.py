"""Dropout that an export left out, put back for training: nodes after the values or operators that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import TakenNames, free_name, value_names
from onward.parameters.training import DropoutRule

_RATIO_IS_INPUT_SINCE = 12


def add_dropout(model: ir.Model, rules: Sequence[DropoutRule]) -> tuple[str, ...]:
    """Inserts Dropout nodes, in place; they are the identity outside of training and never reach an exported model.

    Values that are outputs of the graph are left alone, and nodes that dropout follows already.
    Returns a sentence for each rule.

    Raises:
        ModelError: a rule matches nothing.
    """
    notes, taken = [], value_names(model.graph)
    for number, rule in enumerate(rules):
        places = [node for node in model.graph if _matches(node, rule)]
        if not places:
            wanted = ", ".join((*rule.after_operators, *rule.after_values)) or "nothing"
            raise ModelError(
                f"training.revive_dropout[{number}] names {wanted}, which no node of the model computes; "
                "`onward inspect` lists the operators."
            )
        for node in places:
            _insert(model, node, rule.ratio, taken)
        notes.append(f"dropout of {rule.ratio:g} put back after {len(places)} nodes, for training only.")
    return tuple(notes)


def _matches(node: ir.Node, rule: DropoutRule) -> bool:
    value = node.outputs[0] if node.outputs else None
    if value is None or not value.uses() or value.is_graph_output() or node.op_type == "Dropout":
        return False
    if any(use.node.op_type == "Dropout" and use.idx == 0 for use in value.uses()):
        return False
    if node.domain == "" and node.op_type in rule.after_operators:
        return True
    return any(fnmatchcase(str(value.name), pattern) for pattern in rule.after_values)


def _insert(model: ir.Model, node: ir.Node, ratio: float, taken: TakenNames) -> None:
    graph, value = model.graph, node.outputs[0]
    name = free_name(f"{value.name}_dropped", taken)
    dropped = ir.Value(name=name, shape=value.shape, type=value.type)
    users = [(use.node, use.idx) for use in value.uses()]
    inputs, attributes = [value], []
    if model.opset_imports[""] >= _RATIO_IS_INPUT_SINCE:
        ratio_name = free_name(f"{name}_ratio", taken)
        tensor = ir.Tensor(np.array(ratio, np.float32), name=ratio_name)
        initializer = ir.Value(
            name=ratio_name, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT), const_value=tensor
        )
        graph.register_initializer(initializer)
        inputs.append(initializer)
    else:
        attributes.append(ir.AttrFloat32("ratio", ratio))
    dropout = ir.Node("", "Dropout", inputs, attributes, outputs=[dropped], name=f"dropout/{value.name}")
    graph.insert_after(node, dropout)
    for user, index in users:
        user.replace_input_with(index, dropped)

"""Which weights only one branch of an `If` reads: they get no gradient from data that take the other."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.nodes.iteration import every_node
from onward.graph.weights.names import WeightNames

_SHOWN = 6


def notes_on_branches(graph: ir.Graph, weights: Collection[str], known_as: WeightNames) -> tuple[str, ...]:
    """A sentence for each `If` of the main graph with weights that one of its branches reads alone."""
    outside = _read_outside(graph)
    notes = []
    for node in graph:
        if node.op_type != "If" or node.domain != "":
            continue
        then, other = (_read_in(node.attributes[name].as_graph()) for name in ("then_branch", "else_branch"))
        only = {
            "then_branch": [name for name in weights if name in then and name not in other | outside],
            "else_branch": [name for name in weights if name in other and name not in then | outside],
        }
        if any(only.values()):
            notes.append(_note(node, only, known_as))
    return tuple(notes)


def _note(node: ir.Node, only: dict[str, list[str]], known_as: WeightNames) -> str:
    condition = node.inputs[0]
    stored = None if condition is None or condition.is_graph_input() else condition.const_value
    shown = repr(provenance.shown_node(node))
    if stored is not None:
        idle = only["else_branch" if bool(stored.numpy().reshape(-1)[0]) else "then_branch"]
        if idle:
            return (
                f"the condition of node {shown} (If) is constant; weights of the other branch get no "
                f"gradient and do not change: {_counted(idle)} ({known_as.listed(idle, _SHOWN)})."
            )
    parts = [
        f"only its {branch} reads {_counted(names)} ({known_as.listed(names, _SHOWN)})"
        for branch, names in only.items()
        if names
    ]
    name = "a condition" if condition is None else repr(condition.name)
    return (
        f"node {shown} (If) computes one of two branches, depending on {name}: {', '.join(parts)}. Weights of a branch "
        "that your data never take get no gradient and do not change."
    )


def note_on_missing_gradients(missing: Collection[str], weights: int, known_as: WeightNames) -> str:
    """What to report to a user after the first update, if some weights got no gradient."""
    return (
        f"{len(missing)} of {weights} weights got no gradient in the first update "
        f"({known_as.listed(missing, _SHOWN)}): no computed node reads them, for example in a branch that is not "
        "taken. They do not change until data reach them; list them in training.weights_not_to_train to freeze them."
    )


def _counted(names: Collection[str]) -> str:
    return "1 weight" if len(names) == 1 else f"{len(names)} weights"


def _read_outside(graph: ir.Graph) -> set[str]:
    """What nodes of the main graph read, nested graphs of other operators included."""
    found: set[str] = set()
    for node in graph:
        found.update(str(value.name) for value in node.inputs if value is not None)
        if node.op_type != "If":
            for attribute in node.attributes.values():
                if attribute.type is ir.AttributeType.GRAPH:
                    found |= _read_in(attribute.as_graph())
    return found


def _read_in(graph: ir.Graph) -> set[str]:
    found = {str(value.name) for value in graph.outputs}
    for node in every_node(graph):
        found.update(str(value.name) for value in node.inputs if value is not None)
    return found

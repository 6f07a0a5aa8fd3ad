"""The operator `Gradient` of ai.onnx.preview.training: what it differentiates becomes its own graph.

The standard names that part by its borders, the values `xs`, `zs` and `y` of the surrounding graph. For lowering it
is copied into a graph-valued attribute `body`, which computes `y` from `xs` and `zs`.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.errors import ModelError

TRAINING_DOMAIN = "ai.onnx.preview.training"


def enclose_differentiated_graphs(model: ir.Model) -> None:
    """Gives every `Gradient` node of the main graph its `body`, in place.

    Raises:
        ModelError: a value it names does not exist, or `xs` and `zs` do not determine `y`.
    """
    for node in list(model.graph):
        if node.op_type == "Gradient" and node.domain == TRAINING_DOMAIN and "body" not in node.attributes:
            node.attributes["body"] = ir.AttrGraph("body", _differentiated_graph(model.graph, node))


def _differentiated_graph(graph: ir.Graph, node: ir.Node) -> ir.Graph:
    label = f"node {node.name or node.outputs[0].name!r} (Gradient)"
    borders = {name: _names(node, name) for name in ("xs", "zs", "y")}
    if not borders["xs"] or not borders["y"]:
        raise ModelError(f"{label} must name the value `y` to differentiate and the values `xs` to differentiate by.")
    inputs = [*borders["xs"], *borders["zs"]]
    if len(inputs) != len(node.inputs):
        raise ModelError(f"{label} has {len(node.inputs)} inputs for the {len(inputs)} values of xs and zs.")
    try:
        body = ir.convenience.extract(graph, inputs, borders["y"])
    except ValueError as error:
        raise ModelError(
            f"{label}: {borders['y'][0]!r} is not determined by xs and zs ({', '.join(inputs)}): {error}"
        ) from error
    body.name = f"{node.name or node.outputs[0].name}_body"
    for value in body.inputs:  # of a weight, too, the node's input says which value it takes
        body.initializers.pop(str(value.name), None)
        value.const_value = None
    for name, value in list(body.initializers.items()):
        ir.convenience.replace_all_uses_with(value, graph.initializers[name])
        del body.initializers[name]
    return body


def _names(node: ir.Node, attribute: str) -> list[str]:
    found = node.attributes.get(attribute)
    if found is None:
        return []
    return [found.as_string()] if found.type is ir.AttributeType.STRING else list(found.as_strings())

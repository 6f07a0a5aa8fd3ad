"""Outputs that torch cannot compute and training does not need: not computed, and kept in the exported file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx
import onnx_ir as ir

from onward.errors import OperatorError
from onward.graph.nodes.structure import ML_DOMAIN, label

WhyNotLowered = Callable[[str, str, int], str | None]
"""(domain, operator, opset version) -> why it cannot be computed, or None if it can."""

STRINGS = "it computes with strings, which torch tensors cannot hold"

_LABELS = {
    "LinearClassifier": "classlabels_strings",
    "SVMClassifier": "classlabels_strings",
    "TreeEnsembleClassifier": "classlabels_strings",
}
"""Classifiers -> the attribute that makes their first output one of strings."""


def leave_out_side_outputs(model: ir.Model, why_not_lowered: WhyNotLowered | None = None) -> dict[str, str]:
    """Takes outputs that cannot be computed out of a prepared model, with the nodes that nothing else needs.

    A model none of whose outputs can be computed stays as it is, for the lowering to name its operators.

    Args:
        model: changed in place.
        why_not_lowered: asked for every operator; None: only values that no tensor of torch holds are left out.

    Returns:
        Why each output was left out, by its name.

    Raises:
        OperatorError: every output needs strings.
    """
    obstacles = find_obstacles(model, why_not_lowered)
    left = {str(value.name): obstacles[value] for value in model.graph.outputs if value in obstacles}
    if not left or len(left) == len(model.graph.outputs):
        _refuse_strings(model, left)
        return {}
    kept = [value for value in model.graph.outputs if value not in obstacles]
    model.graph.outputs.clear()
    model.graph.outputs.extend(kept)
    for node in reversed(list(model.graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            model.graph.remove(node, safe=True)
    return left


def _refuse_strings(model: ir.Model, left: Mapping[str, str]) -> None:
    """Says where a model that reads strings can be cut."""
    strings = string_values(model)
    inputs = [str(value.name) for value in model.graph.inputs if value in strings]
    if not inputs or not all(STRINGS in reason for reason in left.values()):
        return
    readers = [node for node in model.graph if any(value in strings for value in node.inputs)]
    firsts = [str(value.name) for node in readers for value in node.outputs if value not in strings]
    if not firsts or set(firsts) & set(left):
        return  # nothing is left behind them
    others = [str(value.name) for value in model.graph.inputs if value not in strings]
    named = ", ".join(repr(name) for name in firsts)
    raise OperatorError(
        f"the model reads strings, which torch tensors cannot hold: {', '.join(map(repr, inputs))}. The first numeric "
        f"values computed from them are {named}. Compute these with onnxruntime to prepare the data, and train the "
        f"rest: onnx.utils.extract_model(model, part, {[*firsts, *others]}, {list(left)}). Or convert the "
        "pipeline again with its categories as integers."
    )


def notes_on_side_outputs(left: Mapping[str, str]) -> tuple[str, ...]:
    """What becomes of the outputs that are not computed, one sentence each, for the user."""
    return tuple(
        f"the output {name!r} is not computed: {reason}. It stays unchanged in the exported model."
        for name, reason in left.items()
    )


def find_obstacles(model: ir.Model, why_not_lowered: WhyNotLowered | None) -> dict[ir.Value, str]:
    """Values of the main graph that cannot be computed, and why: what their node or one before it does."""
    strings = string_values(model)
    found: dict[ir.Value, str] = dict.fromkeys(strings, "it holds strings")
    for node in model.graph:
        reason = next((found[value] for value in _read(node) if value in found and value not in strings), None)
        if reason is None:
            reason = _why_not(model, node, why_not_lowered)
        if reason is None and any(value in strings for value in _read(node)):
            reason = f"{label(node)}: {STRINGS}"
        if reason is not None:
            found.update(dict.fromkeys(node.outputs, reason))
    return found


def _why_not(model: ir.Model, node: ir.Node, why_not_lowered: WhyNotLowered | None) -> str | None:
    if why_not_lowered is None:
        return None
    for inner in _with_nested(node):
        version = model.opset_imports.get(inner.domain)
        if version is not None:
            reason = why_not_lowered(inner.domain, inner.op_type, version)
            if reason is not None:
                return f"{label(inner)} of domain {inner.domain or 'ai.onnx'!r}: {reason}"
    return None


def _with_nested(node: ir.Node) -> Iterator[ir.Node]:
    yield node
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            yield from ir.traversal.RecursiveGraphIterator(attribute.as_graph())


def _read(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, in its nested graphs included."""
    for inner in _with_nested(node):
        yield from (value for value in inner.inputs if value is not None)


def string_values(model: ir.Model) -> set[ir.Value]:
    """The values of the main graph that are tensors of strings, by their declared types or by the nodes."""
    graph = model.graph
    found = {value for value in (*graph.inputs, *graph.initializers.values()) if value.dtype is ir.DataType.STRING}
    for node in graph:
        version = model.opset_imports.get(node.domain, 1)
        for index, value in enumerate(node.outputs):
            if value.dtype is ir.DataType.STRING or (
                value.dtype is None and _gives_strings(node, index, version, found)
            ):
                found.add(value)
    return found


def _gives_strings(node: ir.Node, index: int, version: int, strings: set[ir.Value]) -> bool:
    attributes = node.attributes
    if node.domain == ML_DOMAIN:
        if node.op_type in _LABELS:
            return index == 0 and bool(_strings_of(node, _LABELS[node.op_type]))
        if node.op_type == "LabelEncoder":
            tensor = attributes.get("values_tensor")
            if tensor is not None:
                return tensor.as_tensor().dtype is ir.DataType.STRING
            from_numbers = "classes_strings" in attributes and node.inputs[0] not in strings
            return "values_strings" in attributes or from_numbers
        if node.op_type == "CategoryMapper":
            return node.inputs[0] not in strings
    if node.op_type == "Cast" and "to" in attributes and attributes["to"].type is ir.AttributeType.INT:
        return attributes["to"].as_int() == int(ir.DataType.STRING)
    return _same_type_as_strings(node, index, version, strings)


def _strings_of(node: ir.Node, attribute: str) -> tuple[str, ...]:
    found = node.attributes.get(attribute)
    return () if found is None else tuple(found.as_strings())


def _same_type_as_strings(node: ir.Node, index: int, version: int, strings: set[ir.Value]) -> bool:
    """Whether the standard gives an output strings, always or as the type that it shares with an input of strings."""
    try:
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError:
        return False
    if not schema.outputs:
        return False
    kind = schema.outputs[min(index, len(schema.outputs) - 1)].type_str
    if kind == "tensor(string)":
        return True
    return any(
        value in strings and schema.inputs[min(place, len(schema.inputs) - 1)].type_str == kind
        for place, value in enumerate(node.inputs)
        if value is not None
    )

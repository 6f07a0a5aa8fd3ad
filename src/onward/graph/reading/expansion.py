"""Operators that the standard defines by a body of simpler ones, replaced by that body.

Bodies come from the onnx package, written for the newest opset at or below the model's; none of the operators they
use has changed its meaning since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from onward.errors import ModelError
from onward.graph.nodes.iteration import every_node

HasLowering = Callable[[str, str, int], bool]
"""(domain, operator, opset version) -> whether it is computed directly."""

_DOMAIN = "onward.expansion"
_MOST_ROUNDS = 8


def is_expandable(domain: str, op_type: str, version: int) -> bool:
    """Whether the standard gives a body for this operator that is valid at this opset version."""
    schema = _find_schema(domain, op_type, version)
    if schema is None:
        return False
    written_for = (*schema.function_opset_versions, *schema.context_dependent_function_opset_versions)
    return any(since <= version for since in written_for)


def expand_function_operators(model: ir.Model, has_lowering: HasLowering) -> tuple[str, ...]:
    """Replaces, in place, each node that has a body and no lowering by that body; nested graphs included.

    Constants of the bodies become initializers of the main graph. Returns a line for each replaced node.

    Raises:
        ModelError: a body needs a type of an input that cannot be inferred.
    """
    lines: list[str] = []
    for _ in range(_MOST_ROUNDS):
        nodes = [node for node in every_node(model.graph) if _must_expand(model, node, has_lowering)]
        if not nodes:
            return tuple(lines)
        _infer_types(model, nodes)
        for number, node in enumerate(nodes):
            lines.append(f"node {node.name!r} ({node.op_type}) was expanded into simpler operators.")
            _make_call(model, node, f"{node.op_type}_{len(lines)}_{number}")
        passes.InlinePass(criteria=lambda function: function.domain == _DOMAIN)(model)
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        passes.LiftSubgraphInitializersToMainGraphPass()(model)
    raise ModelError(f"bodies of operators nest more than {_MOST_ROUNDS} deep; the last was {lines[-1]}")


def _find_schema(domain: str, op_type: str, version: int) -> Any:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def _must_expand(model: ir.Model, node: ir.Node, has_lowering: HasLowering) -> bool:
    version = model.opset_imports.get(node.domain)
    if version is None or has_lowering(node.domain, node.op_type, version):
        return False
    if any(attribute.type is ir.AttributeType.GRAPH for attribute in node.attributes.values()):
        return False  # the inliner passes no graphs on
    return is_expandable(node.domain, node.op_type, version)


def _infer_types(model: ir.Model, nodes: list[ir.Node]) -> None:
    """Fills in the types that bodies depend on, if some are missing."""
    if all(value is None or value.type is not None for node in nodes for value in node.inputs):
        return
    passes.ShapeInferencePass(check_type=False, strict_mode=False)(model)


def _make_call(model: ir.Model, node: ir.Node, name: str) -> None:
    """Adds the node's body to the model as a function, and turns the node into a call of it."""
    body = _body_of(model, node)
    function = ir.serde.deserialize_function(body)
    inner = ir.Function(_DOMAIN, name, "", graph=function.graph, attributes=list(function.attributes.values()))
    for domain in list(inner.opset_imports):
        inner.opset_imports[domain] = model.opset_imports.get(domain, inner.opset_imports[domain])
    for part in inner:
        part.name = f"{node.name or name}/{part.name or part.op_type}"
        for output in part.outputs:
            output.name = f"{name}/{output.name}"
    model.functions[inner.identifier()] = inner
    model.opset_imports.setdefault(_DOMAIN, 1)
    _fill_in_defaults(model, node)
    node.domain, node.op_type = _DOMAIN, name


def _body_of(model: ir.Model, node: ir.Node) -> onnx.FunctionProto:
    """The function that defines a node: the newest one at or below the model's opset."""
    version = model.opset_imports[node.domain]
    schema = _find_schema(node.domain, node.op_type, version)
    fixed = [since for since in schema.function_opset_versions if since <= version]
    if fixed:
        encoded = schema.get_function_with_opset_version(max(fixed))
    else:
        since = max(since for since in schema.context_dependent_function_opset_versions if since <= version)
        types = [b"" if value is None else _type_of(node, value) for value in node.inputs]
        proto = ir.to_proto(node).SerializeToString()
        encoded = schema.get_context_dependent_function_with_opset_version(since, proto, types)
    if not encoded:
        raise ModelError(
            f"node {node.name!r} ({node.op_type}) is defined by simpler operators, but not for these inputs and "
            "attributes; check them against the standard."
        )
    body = onnx.FunctionProto()
    body.ParseFromString(encoded)
    computed = {*body.input, *(name for part in body.node for name in part.output)}
    kept = [name for name in body.output if name in computed]
    del body.output[:]
    body.output.extend(kept)
    return body


def _type_of(node: ir.Node, value: ir.Value) -> bytes:
    if value.type is None:
        raise ModelError(
            f"node {node.name!r} ({node.op_type}) is defined by simpler operators that depend on the type of "
            f"{value.name!r}, which is not known; run onnx.shape_inference on the model first."
        )
    encoded: bytes = ir.to_proto(value).type.SerializeToString()
    return encoded


def _fill_in_defaults(model: ir.Model, node: ir.Node) -> None:
    """Writes the standard's default values as attributes of the node, for the body to refer to."""
    schema = _find_schema(node.domain, node.op_type, model.opset_imports[node.domain])
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.type:
            node.attributes[name] = ir.from_proto(attribute.default_value)

"""Whether a model is well formed: names, opsets, the arity and attributes of every node, every value computed once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.provenance import module_scope

OLDEST_OPSET = 1
NEWEST_OPSET = 28
"""The range of ai.onnx versions whose operators the ledger knows."""

ML_DOMAIN = "ai.onnx.ml"
"""The standard's domain of classical machine learning."""

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own operators."""

NEWEST_ML_OPSET = 5


def check_proto(proto: onnx.ModelProto, where: str) -> None:
    """What onnx-ir would pass over in silence: names given twice, tensors without a name.

    Raises:
        ModelError: naming the value, and the nodes that compute it.
    """
    if not proto.HasField("graph"):
        raise ModelError(f"{where} holds no graph.")
    for function in proto.functions:
        check_text([function.domain, function.name, *function.input, *function.output], where)
        _check_node_text(function.node, where)
    for graph in _graphs(proto.graph):
        named = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
        check_text([graph.name, *(one.name for one in named)], where)
        _check_node_text(graph.node, where)
        if any(not tensor.name for tensor in graph.initializer):
            raise ModelError(f"{where}: an initializer of graph {graph.name!r} has no name.")
        _check_element_types(graph.initializer, where)
        _check_unique((tensor.name for tensor in graph.initializer), "initializer", graph, where)
        _check_unique((value.name for value in graph.input), "input", graph, where)
        _check_computed_once(graph, where)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)
            for nested in attribute.graphs:
                yield from _graphs(nested)


def _check_node_text(nodes: Iterable[onnx.NodeProto], where: str) -> None:
    for node in nodes:
        check_text([node.name, node.op_type, node.domain, *node.input, *node.output], where)
        check_text([attribute.name for attribute in node.attribute], where)
        for attribute in node.attribute:
            tensors = [attribute.t] if attribute.type == onnx.AttributeProto.TENSOR else attribute.tensors
            _check_element_types(tensors, f"{where}: attribute {attribute.name!r} of node {node.name!r}")


_ELEMENT_TYPES = frozenset(int(dtype) for dtype in ir.DataType) - {int(ir.DataType.UNDEFINED)}


def _check_element_types(tensors: Iterable[onnx.TensorProto], where: str) -> None:
    for tensor in tensors:
        if tensor.data_type not in _ELEMENT_TYPES:
            raise ModelError(
                f"{where}: the tensor {tensor.name!r} has the element type {tensor.data_type}, unknown to ONNX."
            )


def check_text(names: Iterable[object], where: str) -> None:
    """Protobuf hands out names that are no UTF-8 as bytes.

    Raises:
        ModelError: one of `names` is of that kind.
    """
    for name in names:
        if not isinstance(name, str):
            raise ModelError(f"{where}: the name {name!r} is not UTF-8 text; the file is damaged. Export it again.")


def _check_unique(names: Iterable[str], what: str, graph: onnx.GraphProto, where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ModelError(f"{where}: graph {graph.name!r} has two {what}s named {name!r}.")
        seen.add(name)


def _check_computed_once(graph: onnx.GraphProto, where: str) -> None:
    origin = {value.name: "an input" for value in graph.input}
    origin.update({tensor.name: "an initializer" for tensor in graph.initializer})
    for node in graph.node:
        label = f"node {node.name or (node.output[0] if node.output else '')!r} ({node.op_type})"
        for name in node.output:
            if name and name in origin:
                raise ModelError(f"{where}: {label} computes {name!r}, which is also {origin[name]}.")
            origin[name] = f"an output of {label}"


def check_structure(model: ir.Model, where: str) -> None:
    """Opsets, outputs, the inputs and attributes of every node.

    Raises:
        ModelError: naming the node and the reason.
    """
    _check_opsets(model, where)
    if not model.graph.outputs:
        raise ModelError(f"{where} has no outputs.")
    _check_graph(model.graph, set(), _Scope(where, model.opset_imports, frozenset(model.functions), False))
    for function in model.functions.values():
        inside = f"{where}, function {function.domain}::{function.name}"
        imports = {**model.opset_imports, **function.opset_imports}
        _check_graph(function.graph, set(), _Scope(inside, imports, frozenset(model.functions), True))


@dataclass(frozen=True)
class _Scope:
    """What a node may refer to: opsets, functions, and inside of a function the attributes of its call."""

    where: str
    opsets: Mapping[str, int]
    functions: frozenset[ir.OperatorIdentifier]
    in_function: bool


def _check_opsets(model: ir.Model, where: str) -> None:
    version = model.opset_imports.get("")
    if version is None and any(node.domain == "" for node in model.graph.all_nodes()):
        raise ModelError(f"{where} imports no opset of the standard domain; add an opset_import for it.")
    if version is not None and not OLDEST_OPSET <= version <= NEWEST_OPSET:
        raise ModelError(
            f"{where} is written for opset {version}; opsets {OLDEST_OPSET} to {NEWEST_OPSET} are known. "
            "Convert it with onnx.version_converter, or export it again at an opset in that range."
        )


def label(node: ir.Node) -> str:
    """`node 'name' (Operator) of module.path`, named by its first output where it has no name."""
    outputs = [value.name for value in node.outputs if value.name]
    scope = module_scope(node)
    of = f" of {scope}" if scope else ""
    return f"node {node.name or (outputs[0] if outputs else 'unnamed')!r} ({node.op_type}){of}"


def _check_graph(graph: ir.Graph, outer: set[ir.Value], scope: _Scope) -> None:
    where = scope.where
    _check_initializers(graph, where)
    known = outer | set(graph.inputs) | set(graph.initializers.values())
    known.update(output for node in graph for output in node.outputs)
    for node in graph:
        for index, value in enumerate(node.inputs):
            if value is not None and value not in known:
                raise ModelError(
                    f"{where}: {label(node)} reads {value.name!r} as input {index}, which is neither an input, "
                    f"nor an initializer, nor the output of a node{_near(str(value.name), known)}"
                )
        _check_node(node, scope)
        for attribute in node.attributes.values():
            if not attribute.is_ref() and attribute.type is ir.AttributeType.GRAPH:
                _check_graph(attribute.as_graph(), known, scope)
    for value in graph.outputs:
        if value not in known:
            raise ModelError(
                f"{where}: nothing computes the output {value.name!r} of graph {graph.name!r}"
                f"{_near(str(value.name), known)}"
            )


def _check_initializers(graph: ir.Graph, where: str) -> None:
    """What is declared of a stored tensor elsewhere must be its type; its shape is taken from the tensor."""
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            raise ModelError(f"{where}: the initializer {name!r} holds no data.")
        if value.dtype is not None and value.dtype is not tensor.dtype:
            raise ModelError(
                f"{where}: the initializer {name!r} is stored as {tensor.dtype.name} but declared as "
                f"{value.dtype.name}."
            )
        value.shape = ir.Shape(tensor.shape.numpy())


def _near(name: str, known: Iterable[ir.Value]) -> str:
    names = [str(value.name) for value in known if value.name]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7) if len(names) < 10_000 else []
    return f"; did you mean {close[0]!r}?" if close else "."


def _check_node(node: ir.Node, scope: _Scope) -> None:
    """Arity, and names and kinds of attributes, by the standard's schema; other domains are not judged here."""
    where = scope.where
    for attribute in node.attributes.values():
        if attribute.is_ref() and not scope.in_function:
            raise ModelError(
                f"{where}: {label(node)}: its attribute {attribute.name!r} refers to an attribute of a function, "
                "but the node is in no function."
            )
    if node.domain not in ("", "ai.onnx", ML_DOMAIN) or node.op_identifier() in scope.functions:
        return
    domain, newest = (ML_DOMAIN, NEWEST_ML_OPSET) if node.domain == ML_DOMAIN else ("", NEWEST_OPSET)
    try:
        schema = onnx.defs.get_schema(node.op_type, scope.opsets.get(domain, newest), domain)
    except onnx.defs.SchemaError:
        return  # Lowering names every unknown operator, all of them at once.
    given = [value is not None for value in node.inputs]
    count = len(given) - next((i for i, present in enumerate(reversed(given)) if present), len(given))
    if not schema.min_input <= count <= schema.max_input:
        limits = _limits(schema.min_input, schema.max_input)
        raise ModelError(f"{where}: {label(node)} has {count} inputs; the operator takes {limits}.")
    if len(node.outputs) > schema.max_output:
        limits = _limits(schema.min_output, schema.max_output)
        raise ModelError(f"{where}: {label(node)} has {len(node.outputs)} outputs; the operator gives {limits}.")
    _check_attributes(node, schema, where)


def _limits(fewest: int, most: int) -> str:
    if most >= 2**31 - 1:
        return f"at least {fewest}"
    return str(fewest) if fewest == most else f"{fewest} to {most}"


def _check_attributes(node: ir.Node, schema: onnx.defs.OpSchema, where: str) -> None:
    for name, attribute in node.attributes.items():
        known = schema.attributes.get(name)
        if known is None:
            listed = ", ".join(sorted(schema.attributes)) or "none"
            raise ModelError(
                f"{where}: {label(node)} has the attribute {name!r}; {node.op_type} of version "
                f"{schema.since_version} knows: {listed}."
            )
        expected = str(known.type).rpartition(".")[2]
        if attribute.type.name != expected:
            raise ModelError(
                f"{where}: {label(node)}: its attribute {name!r} is of kind {attribute.type.name}; expected {expected}."
            )
    for name, known in schema.attributes.items():
        if known.required and name not in node.attributes:
            raise ModelError(f"{where}: {label(node)} lacks its attribute {name!r}.")

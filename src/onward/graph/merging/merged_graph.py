"""Another model's nodes and constants moved into a graph: converted to its opset, under a prefix of its names."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.reading.model_file import prepare_for_lowering
from onward.parameters.limits import Limits


def at_opset(merged: ir.Model, writer: NodeWriter, where: str, limits: Limits) -> ir.Model:
    """A model at the opset of the one it is merged into: as it is where no operator changed in between, else converted.

    Raises:
        ModelError: it cannot be converted; `where` names it.
    """
    own, wanted = merged.opset_imports.get("", writer.opset), writer.opset
    changed = sorted({n.op_type for n in merged.graph.all_nodes() if n.domain == "" and _changed(n, own, wanted)})
    if not changed:
        return merged
    try:
        converted = onnx.version_converter.convert_version(ir.to_proto(merged), wanted)
        onnx.checker.check_model(converted)
    except Exception as error:
        raise ModelError(
            f"{where} is written for opset {own} and the model for opset {wanted}, between which "
            f"{', '.join(changed)} changed; onnx.version_converter cannot convert it: {error}. "
            f"Export it for opset {wanted}."
        ) from error
    return prepare_for_lowering(ir.from_proto(converted), limits)


_SETTLED_SINCE = {
    "Abs": 6, "Add": 7, "ArgMax": 13, "BatchNormalization": 15, "Cast": 9, "Clip": 11, "Concat": 11, "Constant": 1,
    "Conv": 11, "Div": 7, "Equal": 7, "Erf": 9, "Exp": 6, "Expand": 8, "Flatten": 11, "Gather": 11, "Gemm": 11,
    "GlobalAveragePool": 1, "Greater": 7, "Identity": 1, "LayerNormalization": 17, "LeakyRelu": 6, "Less": 7, "Log": 6,
    "LogSoftmax": 13, "MatMul": 1, "Max": 8, "MaxPool": 12, "Min": 8, "Mul": 7, "Neg": 6,
    "NegativeLogLikelihoodLoss": 12, "Pow": 7, "Reciprocal": 6, "Relu": 6, "Reshape": 5, "Shape": 1, "Sigmoid": 6,
    "Slice": 11, "Softmax": 13, "SoftmaxCrossEntropyLoss": 12, "Softplus": 1, "Sqrt": 6, "Squeeze": 13, "Sub": 7,
    "Tanh": 6, "Transpose": 1, "Unsqueeze": 13, "Where": 9,
}  # fmt: skip
"""Operator -> version since which later versions only took more element types."""


def _changed(node: ir.Node, own: int, wanted: int) -> bool:
    """Whether a node means something else, or nothing, at the wanted opset."""
    if min(own, wanted) >= _SETTLED_SINCE.get(node.op_type, max(own, wanted)):
        return False
    if node.op_type in ("ReduceMean", "ReduceSum") and len(node.inputs) == 1 and "axes" not in node.attributes:
        return False
    try:
        left = onnx.defs.get_schema(node.op_type, own, "")
        right = onnx.defs.get_schema(node.op_type, wanted, "")
    except onnx.defs.SchemaError:
        return True
    return bool(left.since_version != right.since_version)


def rename(writer: NodeWriter, graph: ir.Graph) -> None:
    """Prefixes the names of every value and node of a graph that is merged, nested graphs included."""
    for value in list(graph.initializers.values()):
        value.name = writer.unique(f"{writer.prefix}{value.name}")
    for node in ir.traversal.RecursiveGraphIterator(graph):
        node.name = writer.unique_node_name(f"{writer.prefix}{node.name or node.op_type.lower()}")
        for value in node.outputs:
            if value.name:
                value.name = writer.unique(f"{writer.prefix}{value.name}")
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                for value in attribute.as_graph().inputs:
                    value.name = writer.unique(f"{writer.prefix}{value.name}")


def check_other_domains(writer: NodeWriter, merged: ir.Model, where: str) -> None:
    """Imports the domains that a merged model uses; raises ModelError where the model has other versions of them."""
    imports = writer.model.opset_imports
    for domain in {node.domain for node in merged.graph.all_nodes()} - {""}:
        version = merged.opset_imports.get(domain)
        if version is None:
            raise ModelError(f"{where} uses operators of the domain {domain!r} but imports no version of it.")
        if imports.setdefault(domain, version) != version:
            raise ModelError(
                f"{where} uses version {version} of the domain {domain!r}; the model uses {imports[domain]}."
            )


def move(writer: NodeWriter, graph: ir.Graph) -> None:
    """Hands initializers and nodes over to the graph of the writer; the initializers are its constants."""
    for name, value in list(graph.initializers.items()):
        graph.initializers.pop(name)
        writer.graph.register_initializer(value)
        writer.constants.append(name)
    nodes = list(graph)
    graph.remove(nodes)
    writer.graph.extend(nodes)

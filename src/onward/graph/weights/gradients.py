"""Through which inputs of which operators a gradient flows, and what it reaches from the loss."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.graph.classical.rewriting import DOMAIN as CLASSICAL_DOMAIN
from onward.graph.nodes.structure import ML_DOMAIN
from onward.graph.operators import operator
from onward.graph.weights.quantization import gives_real_numbers, is_only_dequantized

TRAINABLE_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""Element types that can carry a gradient."""

_QUANTIZES = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
_MULTIPLIES_INTEGERS = frozenset({"MatMulInteger", "ConvInteger"})


def is_without_gradient(node: ir.Node, index: int) -> bool:
    """Whether no gradient flows back through an input of a node."""
    if node.domain == "com.microsoft":
        # What ONNX Runtime's quantizer writes for numbers that stay quantized.
        return node.op_type.startswith("QLinear") or (node.op_type == "QGemm" and not gives_real_numbers(node))
    if node.op_type in _QUANTIZES and not is_only_dequantized(node.outputs[0]):
        return True
    if node.op_type in _MULTIPLIES_INTEGERS and not gives_real_numbers(node):
        return True
    if node.domain in ("", ML_DOMAIN, CLASSICAL_DOMAIN) and operator(node.op_type).blocks_gradient(index):
        return True
    to = node.attributes.get("to")
    if node.op_type != "Cast" or to is None:
        return False
    if to.type is ir.AttributeType.STRING:  # before opset 6 the type was given by name
        return to.as_string().upper() not in {data_type.name for data_type in TRAINABLE_TYPES}
    return ir.DataType(to.as_int()) not in TRAINABLE_TYPES


def reached_by_gradient(graph: ir.Graph, roots: Sequence[str]) -> set[str]:
    """Names of initializers that a gradient from the values named `roots` reaches, nested graphs included."""
    by_name = {str(v.name): v for v in graph.outputs}
    by_name.update({str(o.name): o for node in graph for o in node.outputs})
    stack = [by_name[name] for name in roots if name in by_name]
    seen: set[ir.Value] = set()
    names: set[str] = set()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.is_initializer():
            names.add(str(value.name))
        node = value.producer()
        if node is None:
            continue
        passing = [v for i, v in enumerate(node.inputs) if v is not None and not is_without_gradient(node, i)]
        stack.extend(v for v in passing if v.dtype is None or v.dtype in TRAINABLE_TYPES or v.producer() is not None)
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                stack.extend(attribute.as_graph().outputs)
    return names

"""Linear layers: a product with a weight and the sum with its bias become one node, computed in one call."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.fusion.rewriting import Editor, producer
from onward.graph.nodes.known_values import integer, integers
from onward.graph.weights.gradients import TRAINABLE_TYPES

KIND = "linear"

_FIRST_OPSET = 7
"""Sums of older models say by an attribute how they broadcast."""


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """`hidden @ weight + bias`, and the value that is its result.

    Attributes:
        hidden: [..., W].
        weight: [V, W] if `rows_are_outputs`, else [W, V].
        bias: [V], or None.
        result: [..., V].
        nodes: the product, and the sum where it is its own node.
    """

    hidden: ir.Value
    weight: ir.Value
    rows_are_outputs: bool
    bias: ir.Value | None
    result: ir.Value
    nodes: tuple[ir.Node, ...]


def fuse_linear(editor: Editor) -> None:
    """Replaces products with stored weights and the sums after them; `Gemm` with its bias is one call as it is."""
    if editor.facts.opset < _FIRST_OPSET:
        return
    for node in editor.nodes("Add"):
        layer = find_linear(editor, node.outputs[0])
        if layer is None or not layer.weight.is_initializer() or layer.weight.dtype not in TRAINABLE_TYPES:
            continue
        if layer.result.name in editor.kept or not editor.are_interior(layer.nodes, layer.result):
            continue
        output = editor.write(
            "Linear",
            [layer.hidden, layer.weight, layer.bias],
            node,
            fused=True,
            name=KIND,
            rows_are_outputs=int(layer.rows_are_outputs),
        )
        editor.replace(layer.result, output, KIND, 2, "a product and its bias")


def find_linear(editor: Editor, value: ir.Value) -> LinearLayer | None:
    """The linear layer whose result a value is."""
    node = producer(value, "MatMul", "Gemm", "Add")
    if node is None or node.op_type != "Add":
        return None if node is None else _of_product(editor, node)
    for product, bias in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
        inner = producer(product, "MatMul", "Gemm")
        if inner is None or bias is None or editor.facts.rank(bias) != 1:
            continue
        found = _of_product(editor, inner)
        if found is None or found.bias is not None or not _is_bias(editor, found, bias):
            return None
        return LinearLayer(
            hidden=found.hidden,
            weight=found.weight,
            rows_are_outputs=found.rows_are_outputs,
            bias=bias,
            result=value,
            nodes=(inner, node),
        )
    return None


def _is_bias(editor: Editor, layer: LinearLayer, bias: ir.Value) -> bool:
    """Whether a vector has a number for every output; one that broadcasts, or makes the result wider, does not."""
    given, matrix = editor.facts.shape(bias), editor.facts.shape(layer.weight)
    if given is None or matrix is None or given == (1,):
        return False
    return given[0] is not None and given[0] == matrix[0 if layer.rows_are_outputs else 1]


def _of_product(editor: Editor, node: ir.Node) -> LinearLayer | None:
    hidden, weight = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if hidden is None or weight is None or editor.facts.rank(weight) != 2 or (editor.facts.rank(hidden) or 0) < 2:
        return None
    rows_are_outputs = False
    if node.op_type == "Gemm":
        alpha, beta = (node.attributes[n].as_float() if n in node.attributes else 1.0 for n in ("alpha", "beta"))
        if alpha != 1.0 or integer(node, "transA", 0):
            return None
        if bias is not None and (beta != 1.0 or editor.facts.rank(bias) != 1 or editor.facts.shape(bias) == (1,)):
            return None
        rows_are_outputs = bool(integer(node, "transB", 0))
    transpose = producer(weight, "Transpose")
    if transpose is not None and transpose.inputs[0] is not None and integers(transpose, "perm") in (None, (1, 0)):
        weight, rows_are_outputs = transpose.inputs[0], not rows_are_outputs
    return LinearLayer(
        hidden=hidden,
        weight=weight,
        rows_are_outputs=rows_are_outputs,
        bias=bias,
        result=node.outputs[0],
        nodes=(node,),
    )

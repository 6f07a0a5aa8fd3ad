"""Which weights are matrices of hidden layers: multiplied with activations, and neither embeddings nor a last layer.

Muon orthogonalizes the updates of these; all other weights have other gradients, for which it is not meant.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from onward.graph.operators import Fact, has_fact, operator, operators_with

_MOVING = operators_with(Fact.SAME_ELEMENTS) | {"Cast", "Transpose", "Identity"}


def hidden_matrices(graph: ir.Graph, weights: Collection[str]) -> tuple[str, ...]:
    """Trainable weights of two axes that only linear layers read, each of which has another layer after it.

    Args:
        graph: of the entire network, with its loss.
        weights: the trainable ones.
    """
    readers = {name: _readers(graph.initializers[name]) for name in weights if name in graph.initializers}
    layers = {node for name, found in readers.items() for node, _ in found if _axes(graph.initializers[name]) > 1}
    before_layers: set[ir.Node] = set()
    stack = list(layers)
    while stack:
        fresh = [node for node in stack.pop().predecessors() if node not in before_layers]
        before_layers.update(fresh)
        stack += fresh
    return tuple(
        name
        for name, found in readers.items()
        if _axes(graph.initializers[name]) == 2
        and found
        and all(_is_linear(node, index, graph) and node in before_layers for node, index in found)
    )


def _readers(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """The nodes that compute with a tensor, and at which input; nodes that only move its elements are passed."""
    found: list[tuple[ir.Node, int]] = []
    stack = [value]
    while stack:
        for use in stack.pop().uses():
            if use.node.op_type in _MOVING:
                stack += use.node.outputs
            else:
                found.append((use.node, use.idx))
    return found


def _is_linear(node: ir.Node, index: int, graph: ir.Graph) -> bool:
    is_layer = has_fact(node.op_type, Fact.MATMUL) and operator(node.op_type).input(index) == "weight"
    return is_layer and node.graph is graph


def _axes(value: ir.Value) -> int:
    """Axes of more than one element, or more than two if there are as many."""
    shape = [] if value.const_value is None else [int(size) for size in value.const_value.shape.numpy()]
    return len(shape) if len(shape) != 2 or min(shape) > 1 else 1

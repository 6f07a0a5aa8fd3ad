"""Which nodes of a graph belong to one pipeline stage, and which every stage that needs them computes for itself.

What depends on the network's inputs alone (masks, positions, shapes) or on weights alone (a transposed embedding) is
light: every rank has the batch, and a weight is on each stage that reads it. The rest is bound to one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.cuts import reads
from onward.graph.operators import Fact, has_fact, operators_with
from onward.graph.training_graph import TrainingGraph
from onward.graph.weights.frozen_weights import constant_sources, frozen_layers
from onward.graph.weights.gradients import TRAINABLE_TYPES, is_without_gradient
from onward.graph.weights.quantization import is_only_dequantized

_LAYERS = operators_with(Fact.CONVOLUTION | Fact.RECURRENT) | {"Gemm", "Attention", "BatchNormalization"}


@dataclass(frozen=True, kw_only=True)
class ValueRoles:
    """What the nodes of a graph are to a pipeline.

    Attributes:
        nodes: those that an output of the graph needs, in topological order.
        bound: those of them that are computed on one stage.
        roots: of each light node, the bound values whose shapes it was made from.
        with_gradient: values through which a gradient flows to a trained weight.
        producers: node of each value.
        outputs: values that the graph gives out, the loss among them.
    """

    nodes: tuple[ir.Node, ...]
    bound: frozenset[ir.Node]
    roots: Mapping[ir.Node, frozenset[ir.Value]]
    with_gradient: frozenset[ir.Value]
    producers: Mapping[ir.Value, ir.Node]
    outputs: tuple[ir.Value, ...]

    def weights_of(self, node: ir.Node, weights: frozenset[str]) -> set[str]:
        """The trained weights that a node reads, through light nodes too."""
        found: set[str] = set()
        seen: set[ir.Node] = set()
        stack = [node]
        while stack:
            one = stack.pop()
            for value in reads(one):
                producer = self.producers.get(value)
                if producer is None:
                    found |= {str(value.name)} & weights
                elif producer not in self.bound and producer not in seen:
                    seen.add(producer)
                    stack.append(producer)
        return found


def node_id(node: ir.Node) -> str:
    """What a plan calls a node: the name of its first output, which no other node has."""
    return next(str(value.name) for value in node.outputs if value.name)


def find_roles(graph: TrainingGraph, watched: Sequence[str] = ()) -> ValueRoles:
    """Tells the nodes that are bound to a stage from those that are light; `watched` values are outputs, too."""
    main = graph.model.graph
    outputs = _outputs(graph, frozenset(watched))
    producers = {value: node for node in main for value in node.outputs}
    nodes = _needed(main, outputs, producers)
    trained = {main.initializers[name] for name in graph.weights if name in main.initializers}
    from_input = {value for value in main.inputs if not value.is_initializer()}
    from_weight = set(trained)
    with_gradient = set(trained)
    bound: set[ir.Node] = set()
    bound_values: set[ir.Value] = set()
    roots: dict[ir.Node, frozenset[ir.Value]] = {}
    frozen = frozen_layers(main, constant_sources(main, (*graph.weights, *graph.states)))
    for node in nodes:
        read = list(reads(node))
        if has_fact(node.op_type, Fact.SHAPE_ONLY) and node.domain == "" and read[0] in bound_values:
            roots[node] = frozenset({read[0]})
            continue
        input_too = any(value in from_input for value in read)
        weight_too = any(value in from_weight for value in read)
        is_mixed = (input_too and weight_too) or any(value in bound_values for value in read)
        if is_mixed or node in frozen or _is_bound(node, weight_too):
            bound.add(node)
            bound_values.update(node.outputs)
        else:
            roots[node] = frozenset().union(*(roots[producers[v]] for v in read if v in producers))
        if input_too:
            from_input.update(node.outputs)
        if weight_too:
            from_weight.update(node.outputs)
        blocked = {value for index, value in enumerate(node.inputs) if is_without_gradient(node, index)}
        if any(value in with_gradient and value not in blocked for value in read):
            with_gradient.update(
                v for v in node.outputs if v.dtype is None or v.dtype in TRAINABLE_TYPES or is_only_dequantized(v)
            )
    return ValueRoles(
        nodes=tuple(nodes),
        bound=frozenset(bound),
        roots=roots,
        with_gradient=frozenset(with_gradient),
        producers=producers,
        outputs=outputs,
    )


def _outputs(graph: TrainingGraph, watched: frozenset[str]) -> tuple[ir.Value, ...]:
    main = graph.model.graph
    inner = (value for node in main for value in node.outputs if value.name in watched) if watched else ()
    return tuple(dict.fromkeys((*(value for value in main.outputs if value is not None), *inner)))


def _needed(main: ir.Graph, outputs: Iterable[ir.Value], producers: Mapping[ir.Value, ir.Node]) -> list[ir.Node]:
    needed: set[ir.Node] = set()
    stack = [producers[value] for value in outputs if value in producers]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(producers[value] for value in reads(node) if value in producers)
    return [node for node in main if node in needed]


def _is_bound(node: ir.Node, reads_weight: bool) -> bool:
    """Whether a node must not be computed twice: it draws random numbers, keeps statistics, or is a layer."""
    if _draws(node):
        return True
    return node.op_type == "BatchNormalization" or (node.domain == "" and node.op_type in _LAYERS and not reads_weight)


def _draws(node: ir.Node) -> bool:
    if (
        has_fact(node.op_type, Fact.RANDOM) or "Dropout" in node.op_type
    ):  # of any domain: BiasDropout, BitmaskDropout, ...
        return True
    return any(
        _draws(inner)
        for attribute in node.attributes.values()
        if not attribute.is_ref() and attribute.type is ir.AttributeType.GRAPH
        for inner in attribute.as_graph()
    )

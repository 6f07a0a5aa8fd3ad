"""Where a graph can be cut: values that are the only activation still needed, as between the layers of a network."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.weights.gradients import TRAINABLE_TYPES, is_without_gradient


@dataclass(frozen=True, kw_only=True)
class CutPoint:
    """A value after whose node nothing else that a gradient flows through is needed further on.

    Attributes:
        value: its name.
        node: name of the node that computes it.
        nodes_before, nodes_after: how many nodes are on either side, that node before.
        weights_before: how many trained weights are first read before.
        shape: of the value, as far as it is known.
    """

    value: str
    node: str
    nodes_before: int
    nodes_after: int
    weights_before: int
    shape: tuple[int | str, ...] | None


def find_cut_points(graph: ir.Graph, weights: Collection[str]) -> tuple[CutPoint, ...]:
    """The cut points of a graph in topological order; between two of them, and at both ends, there is a trained weight.

    An activation depends on a graph input and on a trained weight. Inputs themselves, and what is computed from inputs
    alone (masks, positions, shapes) or from weights alone (a transposed embedding), do not count: every part of a cut
    graph can have them. Nor do outputs that nothing reads further on.
    """
    nodes = list(graph)
    activations = _activations(graph, nodes, weights)
    last_read: dict[ir.Value, int] = {}
    for index, node in enumerate(nodes):
        for value in reads(node):
            if value in activations:
                last_read[value] = index
    weight_counts = _weights_read(nodes, weights)
    found: list[CutPoint] = []
    live: set[ir.Value] = set()
    for index, node in enumerate(nodes[:-1]):
        live.update(value for value in node.outputs if last_read.get(value, -1) > index)
        live = {value for value in live if last_read[value] > index}
        if len(live) != 1 or next(iter(live)).producer() is not node:
            continue
        read = weight_counts[index]
        if read == 0 or read == weight_counts[-1]:
            continue
        if found and found[-1].weights_before == read:
            found.pop()  # the last value before the next weight is the boundary of a layer
        (value,) = live
        found.append(
            CutPoint(
                value=str(value.name),
                node=str(node.name or ""),
                nodes_before=index + 1,
                nodes_after=len(nodes) - index - 1,
                weights_before=read,
                shape=shape_of(value),
            )
        )
    return tuple(found)


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """What a node reads, its nested graphs included."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if not attribute.is_ref() and attribute.type is ir.AttributeType.GRAPH:
            nested = attribute.as_graph()
            for inner in nested:
                yield from reads(inner)
            yield from nested.outputs


def shape_of(value: ir.Value) -> tuple[int | str, ...] | None:
    """Sizes as numbers, open dimensions as their names or `?`; None for an unknown rank."""
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else str(d.value) if d.value is not None else "?" for d in value.shape)


def _activations(graph: ir.Graph, nodes: Sequence[ir.Node], weights: Collection[str]) -> set[ir.Value]:
    """Float values that depend both on a graph input and, through a gradient, on a trained weight."""
    from_input = {value for value in graph.inputs if not value.is_initializer()}
    from_weight = {graph.initializers[name] for name in weights if name in graph.initializers}
    for node in nodes:
        read = list(reads(node))
        if any(value in from_input for value in read):
            from_input.update(node.outputs)
        if not any(value in from_weight for value in read):
            continue
        blocked = {value for index, value in enumerate(node.inputs) if is_without_gradient(node, index)}
        if any(value in from_weight and value not in blocked for value in read):
            from_weight.update(v for v in node.outputs if v.dtype is None or v.dtype in TRAINABLE_TYPES)
    return from_input & from_weight


def _weights_read(nodes: Sequence[ir.Node], weights: Collection[str]) -> list[int]:
    """After each node, how many trained weights were read so far."""
    seen: set[str] = set()
    counts = []
    for node in nodes:
        seen.update(str(v.name) for v in reads(node) if v.is_initializer() and v.name in weights)
        counts.append(len(seen))
    return counts

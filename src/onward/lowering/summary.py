"""What a network is made of, layer by layer: output shapes, parameters, bytes; `net.summary()`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.nodes.shape_inference import inferred_values
from onward.graph.training_graph import TrainingGraph
from onward.tables import aligned, bytes_text, html_table

HEADINGS = ("layer", "operator", "output", "trainable", "frozen", "bytes")
_RIGHT = (3, 4, 5)


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """A node of the user's graph that reads weights.

    Attributes:
        name: its module's path where the file notes one, else the node's name or its result's.
        operator: of the node.
        output: shape of its first result, open sizes by name; None: unknown.
        trainable, frozen: elements of its weights; of one that several nodes read, at the first of them.
        bytes: of both.
    """

    name: str
    operator: str
    output: tuple[int | str, ...] | None
    trainable: int
    frozen: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class NetSummary:
    """A network as a table; its text and its HTML are what a terminal and a notebook show.

    Attributes:
        layers: nodes that read weights, in the order of the graph.
        other_nodes: how many nodes read none.
        inputs, outputs: name -> shape.
        trainable, frozen: parameters of all layers.
        bytes: of both.
    """

    layers: tuple[LayerSummary, ...]
    other_nodes: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    trainable: int
    frozen: int
    bytes: int

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The table, the heading first and the totals last."""
        body = [
            (
                one.name,
                one.operator,
                _shape_text(one.output),
                f"{one.trainable:,}",
                f"{one.frozen:,}",
                bytes_text(one.bytes),
            )
            for one in self.layers
        ]
        total = ("total", f"{self.other_nodes} further nodes", "", f"{self.trainable:,}", f"{self.frozen:,}")
        return [HEADINGS, *body, (*total, bytes_text(self.bytes))]

    def __str__(self) -> str:
        ends = [f"{kind}  {', '.join(f'{n} {s}' for n, s in of.items())}" for kind, of in self._ends]
        return "\n".join([*ends, "", *aligned(self.rows, _RIGHT)])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        ends = "; ".join(f"{kind}: {', '.join(f'{n} {s}' for n, s in of.items())}" for kind, of in self._ends)
        return html_table(self.rows, _RIGHT, ends)

    @property
    def _ends(self) -> tuple[tuple[str, Mapping[str, str]], ...]:
        return ("inputs", self.inputs), ("outputs", self.outputs)


def summarize_graph(graph: TrainingGraph, trainable: Collection[str]) -> NetSummary:
    """The summary of a graph.

    Args:
        graph: whose source is the user's own.
        trainable: weights that training changes now.
    """
    known = inferred_values(graph.source)
    seen: set[str] = set()
    layers, others = [], 0
    for node in graph.source.graph:
        weights = [value for value in node.inputs if value is not None and _is_weight(value, graph)]
        if not weights:
            others += 1
            continue
        new = [value for value in weights if value.name not in seen]
        seen |= {str(value.name) for value in new}
        layers.append(_layer(node, new, weights, graph, trainable, known))
    model = graph.source.graph
    return NetSummary(
        layers=tuple(layers),
        other_nodes=others,
        inputs={str(v.name): _shape_text(_shape(v, known)) for v in model.inputs if not v.is_initializer()},
        outputs={str(v.name): _shape_text(_shape(v, known)) for v in model.outputs},
        trainable=sum(one.trainable for one in layers),
        frozen=sum(one.frozen for one in layers),
        bytes=sum(one.bytes for one in layers),
    )


def _layer(
    node: ir.Node,
    new: list[ir.Value],
    weights: list[ir.Value],
    graph: TrainingGraph,
    trainable: Collection[str],
    known: Mapping[str, ir.Value],
) -> LayerSummary:
    first = node.outputs[0]
    paths = [graph.known_as.paths.get(str(v.name), str(v.name)) for v in weights]
    name = next((path.rpartition(".")[0] for path in paths if "." in path.strip(".")), "")
    sizes = [(str(v.name), v.const_value) for v in new]
    return LayerSummary(
        name=name or str(node.name or first.name),
        operator=node.op_type,
        output=_shape(first, known),
        trainable=sum(t.size for name, t in sizes if t is not None and name in trainable),
        frozen=sum(t.size for name, t in sizes if t is not None and name not in trainable),
        bytes=sum(t.nbytes for _, t in sizes if t is not None),
    )


def _is_weight(value: ir.Value, graph: TrainingGraph) -> bool:
    """Parameters, trainable or not, and running statistics; no constants of the arithmetic."""
    tensor, name = value.const_value, str(value.name)
    if tensor is None or not value.is_initializer():
        return False
    return name in graph.weights or name in graph.states or (name in graph.frozen and len(tensor.shape) > 0)


def _shape(value: ir.Value, known: Mapping[str, ir.Value]) -> tuple[int | str, ...] | None:
    shape = value.shape
    if shape is None and value.name in known:
        shape = known[str(value.name)].shape
    return None if shape is None else tuple(s if isinstance(s, int) else str(s.value or "?") for s in shape)


def _shape_text(shape: tuple[int | str, ...] | None) -> str:
    return "?" if shape is None else f"[{', '.join(map(str, shape))}]"

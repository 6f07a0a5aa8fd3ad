"""Replacing several nodes by one, in place, without losing a name that somebody asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.known_values import KnownValues
from onward.graph.nodes.node_writer import Attribute, NodeFactory

DOMAIN = "onward.fused"
"""Domain of the nodes that fusion writes: named like operators of the standard, for models of any opset."""


@dataclass(frozen=True)
class Fusion:
    """One node that stands for several.

    Attributes:
        kind: which fusion: the word that turns it off.
        node: name of the new node.
        replaced: how many nodes it stands for.
        about: what the user may want to know of it.
    """

    kind: str
    node: str
    replaced: int
    about: str = ""


class Fused(NamedTuple):
    """What was fused, and what is of a known kind but was not, with the reason."""

    done: tuple[Fusion, ...] = ()
    missed: tuple[str, ...] = ()


class Editor(NodeFactory):
    """Rewrites the main graph of a model that is prepared for lowering.

    Attributes:
        facts: what is known of its values.
        kept: names of values that must stay computed, and of nodes that must stay as they are.
        done: what was fused so far.
        missed: what is of a known kind but was not fused, and why, one text each.
    """

    def __init__(self, model: ir.Model, facts: KnownValues, kept: frozenset[str]) -> None:
        super().__init__(model)
        self.facts, self.kept, self.done, self.missed = facts, kept, list[Fusion](), list[str]()

    def nodes(self, *op_types: str) -> Iterator[ir.Node]:
        """The nodes of the main graph with these operators; those that are gone meanwhile are left out."""
        for node in [n for n in self.graph if n.domain == "" and n.op_type in op_types]:
            if node.graph is self.graph:
                yield node

    def is_free(self, value: ir.Value, *, within: Collection[ir.Node]) -> bool:
        """Whether nobody but these nodes reads a value, and nobody asked for it by name."""
        if value.is_graph_output() or value.name in self.kept:
            return False
        return all(use.node in within for use in value.uses())

    def are_interior(self, nodes: Collection[ir.Node], result: ir.Value) -> bool:
        """Whether these nodes compute nothing that is read elsewhere, but for the result."""
        if any(node.name in self.kept for node in nodes):
            return False
        values = (value for node in nodes for value in node.outputs if value is not result)
        return all(self.is_free(value, within=nodes) for value in values)

    def write(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        before: ir.Node,
        *,
        fused: bool = False,
        name: str = "",
        **attributes: Attribute,
    ) -> ir.Value:
        """Inserts a node before another and returns its one output; `fused`: it is of the domain `onward.fused`."""
        stem, domain = f"fused/{name or op_type}", DOMAIN if fused else ""
        node = self.new_node(op_type, inputs, stem, attributes, domain=domain)
        self.graph.insert_before(before, node)
        return node.outputs[0]

    def integers(self, numbers: Sequence[int] | int) -> ir.Value:
        """An int64 constant."""
        return self.store(np.asarray(numbers, np.int64), "fused/constant")

    def replace(self, old: ir.Value, new: ir.Value, kind: str, count: int, about: str = "") -> None:
        """Lets a new value take the place and the name of an old one; nodes that nobody reads any more go."""
        self.facts.describe(old)
        node = old.producer()
        self.substitute(old, new, "_unfused")
        fused = new.producer()
        assert fused is not None
        self.done.append(Fusion(kind, str(fused.name), count, about))
        if node is not None:
            self.remove_unread([node])

    def remove_unread(self, nodes: Iterable[ir.Node]) -> None:
        """Takes out these nodes, and those before them, as far as nothing reads them."""
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node.graph is not self.graph or any(
                value.uses() or value.is_graph_output() or value.name in self.kept for value in node.outputs
            ):
                continue
            before = [value.producer() for value in node.inputs if value is not None]
            for attribute in node.attributes.values():
                if attribute.type is ir.AttributeType.GRAPH:
                    before += _detach(attribute.as_graph())
            self.graph.remove(node, safe=True)
            stack.extend(source for source in before if source is not None)


def _detach(graph: ir.Graph) -> list[ir.Node | None]:
    """Ends all that nodes of a nested graph read; gives the nodes that computed it."""
    found = []
    for node in ir.traversal.RecursiveGraphIterator(graph):
        for place, value in enumerate(node.inputs):
            found.append(None if value is None else value.producer())
            node.replace_input_with(place, None)
    return found


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node of the standard domain that computes a value, if it is one of these operators."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain == "" and node.op_type in op_types else None


def stored_behind(value: ir.Value | None, moving: Collection[str]) -> ir.Value | None:
    """The initializer of which up to eight operators of the kinds `moving`, one after the other, make a value."""
    for _ in range(8):
        node = producer(value, *moving)
        if node is None:
            break
        value = node.inputs[0]
    return value if value is not None and value.is_initializer() and value.const_value is not None else None


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The second operand of a binary operator next to a value; None if both are that value, or none is."""
    if len(node.inputs) != 2:
        return None
    left, right = node.inputs
    if left is value and right is not value:
        return right
    return left if right is value and left is not value else None


def readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value, each once."""
    return list(dict.fromkeys(use.node for use in value.uses()))

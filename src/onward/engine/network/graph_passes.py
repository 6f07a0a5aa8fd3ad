"""Passes over the graphs that torch compiles: of these, its compiler takes one at each of a few places."""

from __future__ import annotations

import inspect

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_ATEN = torch.ops.aten
VIEWS = frozenset({
    _ATEN._unsafe_view, _ATEN.clone, _ATEN.expand, _ATEN.permute, _ATEN.reshape, _ATEN.select, _ATEN.slice,
    _ATEN.squeeze, _ATEN.t, _ATEN.transpose, _ATEN.unsqueeze, _ATEN.view,
})  # fmt: skip
"""Operators whose results are those of others in another shape or order."""


class GraphPass(CustomGraphPass):
    """Changes a graph in place when it is called."""

    def uuid(self) -> bytes:
        """By which torch's cache of compiled code knows what was done: a hash of the file that says it."""
        return get_hash_for_files((inspect.getfile(type(self)),))


class PassSequence(CustomGraphPass):
    """Several passes, one after the other."""

    def __init__(self, *passes: GraphPass) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        """Calls each."""
        for one in self.passes:
            one(graph)

    def uuid(self) -> bytes:
        """Of all of them."""
        return b"".join(one.uuid() for one in self.passes)


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """What depends on the gradients of results."""
    found = set[fx.Node]()
    for node in graph.nodes:
        is_gradient = node.op == "placeholder" and node.name.startswith("tangents")
        if is_gradient or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found

"""Passes over the graphs that torch compiles: of these, its compiler takes one at each of a few places."""

from __future__ import annotations

import inspect

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files


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

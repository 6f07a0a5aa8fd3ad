"""Slices of one position each, as a loop over time steps reads them, become one call that gives them all.

The gradient of a slice is a tensor of the size of what it was taken from, with zeros elsewhere, and such tensors are
added up, one for every slice; that of all slices together is one stack.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from onward.lowering.building.tensor_facts import fact_about
from onward.lowering.ops.indexing import gather
from onward.lowering.program import Program, pick

Place = tuple[fx.Node, int]
"""A tensor, and one of its axes."""


def with_unbound_slices(program: Program) -> Program:
    """The program with one call for the slices along an axis in `run`, where at least half of them are read.

    Args:
        program: a segment of a specialized one; its code stays, for the names of nodes in errors and profiles.
    """
    source = program.run if isinstance(program.run, fx.GraphModule) else program.code
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(source.graph, copies))
    slices: dict[Place, dict[fx.Node, int]] = {}
    for node in graph.nodes:
        found = _slice(node)
        if found is not None:
            place, position = found
            slices.setdefault(place, {})[node] = position
    changed = False
    for (data, axis), calls in slices.items():
        fact = fact_about(data)
        assert fact is not None
        if len(set(calls.values())) < max(2, fact.shape[axis] / 2):
            continue
        with graph.inserting_before(next(iter(calls))):
            every = graph.call_function(torch.unbind, (data, axis))
        for call, position in calls.items():
            with graph.inserting_before(call):
                one = graph.call_function(pick, (every, position))
            one.meta = dict(call.meta)
            call.replace_all_uses_with(one)
            graph.erase_node(call)
        changed = True
    if not changed:
        return program
    root = {str(n.target): getattr(source, str(n.target)) for n in graph.nodes if n.op == "get_attr"}
    return replace(program, run=fx.GraphModule(root, graph))


def _slice(node: fx.Node) -> tuple[Place, int] | None:
    """What a call takes one position of, along which axis, and the position from 0 on."""
    if node.op != "call_function" or node.target is not gather or type(node.args[1]) is not int:
        return None
    data = node.args[0]
    fact = fact_about(data)
    if fact is None or not isinstance(data, fx.Node):
        return None
    given: Any = node.kwargs.get("axis", 0)
    axis = given % len(fact.shape)
    size = fact.shape[axis]
    return ((data, axis), node.args[1] % size) if -size <= node.args[1] < size else None

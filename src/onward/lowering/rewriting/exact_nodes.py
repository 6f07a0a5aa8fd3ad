"""Nodes that mixed precision leaves in their own types: those of a teacher, which is not what is trained."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from onward.lowering.program import Program


def with_exact_nodes(
    program: Program,
    prefix: str,
    computed: Collection[str],
    labels: Collection[str],
    lower: Callable[[Tensor], Tensor],
) -> tuple[Program, tuple[str, ...]]:
    """A program whose nodes of a prefix are computed without autocast where they follow from features and constants.

    Args:
        program: general; it is left as it is.
        prefix: of the names of these nodes, and of values that earlier pipeline stages computed of them.
        computed: inputs that earlier stages computed.
        labels: inputs that are not lowered for any node.
        lower: what all other nodes read such a feature through.

    Returns:
        The program, and the inputs that it is to be given as they are.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.code.graph, {}))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = dict(zip(placeholders[2 : 2 + len(program.inputs)], program.inputs, strict=True))
    exact = {node for node in placeholders if inputs.get(node) not in computed or inputs[node].startswith(prefix)}
    calls, features = set[fx.Node](), dict[fx.Node, str]()
    for node in graph.nodes:
        label, read = node.meta.get("onnx"), node.all_input_nodes
        # What takes one of several outputs has no label of its own.
        is_asked = label.name.startswith(prefix) if label is not None else not calls.isdisjoint(read)
        if node.op == "call_function" and is_asked and exact.issuperset(read):
            exact.add(node)
            calls.add(node)
            node.target = without_autocast(node.target)
            features |= {one: inputs[one] for one in read if inputs.get(one, "") not in {"", *labels}}
    for feature in features:
        with graph.inserting_after(feature):
            lowered = graph.call_function(lower, (feature,))
        feature.replace_all_uses_with(lowered, functools.partial(_is_lowered, {*exact, lowered}))
    if not calls:
        return program, ()
    return replace(program, code=fx.GraphModule(program.code, graph)), tuple(features.values())


def _is_lowered(exact: Collection[fx.Node], user: fx.Node) -> bool:
    return user not in exact


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes in the types of its arguments."""

    @functools.wraps(function)
    def exact(*arguments: Any, **options: Any) -> Any:
        kinds = [one.device.type for one in arguments if isinstance(one, torch.Tensor)]
        with torch.autocast(kinds[0] if kinds else "cpu", enabled=False):
            return function(*arguments, **options)

    exact.__module__ = __name__  # generated code would call a function by torch's name for it, and not this one
    return exact

"""When two programs are the same code with other weights: a canonical form in which names do not count.

The layers of a deep network are such programs; what is compiled for one of them serves all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from onward.lowering.program import Nested

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)


def structure_of(code: fx.GraphModule) -> Hashable:
    """Equal for two programs that call the same functions on the same arguments in the same order.

    Names of nodes and arguments do not count. A program that holds anything but plain values and calls of functions
    (a nested graph, say) equals only itself.
    """
    place: dict[fx.Node, int] = {}
    lines: list[Hashable] = []
    for node in code.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output") or node.target is Nested:
            return id(code), "itself"
        try:
            arguments = _canonical((node.args, node.kwargs), place)
        except _Unlike:
            return id(code), "itself"
        target = node.target if node.op == "call_function" else node.op
        lines.append((target, arguments) if node.op != "placeholder" else target)
        place[node] = len(place)
    return tuple(lines)


def signature_of(arguments: Sequence[Any]) -> Hashable:
    """Shapes, strides, types and devices of tensors, and whether they take a gradient; other values as they are."""
    return tuple(
        (tuple(a.shape), a.stride(), a.dtype, a.device, a.requires_grad)
        if isinstance(a, torch.Tensor)
        else (type(a), repr(a))
        for a in arguments
    )


class _Unlike(Exception):
    """A value whose equality with another one cannot be told."""


def _canonical(value: Any, place: dict[fx.Node, int]) -> Hashable:
    """A value in which nodes are their places, and in which 1, 1.0 and True differ."""
    if isinstance(value, fx.Node):
        return "node", place[value]
    if isinstance(value, tuple | list):
        return type(value).__name__, *(_canonical(item, place) for item in value)
    if isinstance(value, dict):
        return "dict", *((key, _canonical(value[key], place)) for key in sorted(value))
    if isinstance(value, slice):
        return "slice", _canonical((value.start, value.stop, value.step), place)
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)  # -0.0 equals 0.0, but is another number; NaN does not equal itself
    raise _Unlike

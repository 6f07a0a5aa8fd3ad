"""What the compiled backward pass reads of the parts of a concatenation, it reads from the whole, where that is kept.

Torch's compiler would keep both: the whole for the product behind it, and the parts for their activations.
"""

from __future__ import annotations

import torch
from torch import fx

from onward.engine.network.graph_passes import VIEWS, GraphPass, backward_nodes

_ATEN = torch.ops.aten


class ConcatenatedParts(GraphPass):
    """Replaces parts by slices of the whole, in a graph of both passes, before it is cut into the two."""

    def __call__(self, graph: fx.Graph) -> None:
        """Only where element-wise operators read them: to others, a slice is a copy."""
        (output,) = graph.find_nodes(op="output")
        backward = backward_nodes(graph)
        forward = _needed_by([node for node in output.all_input_nodes if node not in backward])
        places = {node: place for place, node in enumerate(graph.nodes)}
        for whole in graph.find_nodes(op="call_function", target=_ATEN.cat.default):
            if whole not in forward or not _is_read_by(whole, backward):
                continue
            axis, start = whole.args[1] if len(whole.args) > 1 else 0, 0
            for part in whole.args[0]:
                end = start + part.meta["val"].shape[axis]
                readers = [node for node in part.users if node not in forward]
                is_replaced = part.op == "call_function" and all(
                    torch.Tag.pointwise in getattr(node.target, "tags", ()) and places[node] > places[whole]
                    for node in readers
                )
                if readers and is_replaced:
                    _replace(part, whole, (axis, start, end), readers)
                start = end


def _needed_by(results: list[fx.Node]) -> set[fx.Node]:
    """These and all that they are computed from."""
    found = set[fx.Node]()
    while results:
        node = results.pop()
        if node not in found:
            found.add(node)
            results.extend(node.all_input_nodes)
    return found


def _is_read_by(value: fx.Node, nodes: set[fx.Node]) -> bool:
    """Whether one of the nodes reads a value or a view of it."""
    return any(
        user in nodes or (getattr(user.target, "overloadpacket", None) in VIEWS and _is_read_by(user, nodes))
        for user in value.users
    )


def _replace(part: fx.Node, whole: fx.Node, place: tuple[int, int, int], readers: list[fx.Node]) -> None:
    with whole.graph.inserting_after(whole):
        piece = whole.graph.call_function(_ATEN.slice.Tensor, (whole, *place))
    with whole.meta["val"].fake_mode:
        piece.meta["val"] = _ATEN.slice.Tensor(whole.meta["val"], *place)
    for node in readers:
        node.replace_input_with(part, piece)

"""What narrow matmuls and convolutions read is kept for the compiled backward pass, not recomputed.

Recomputing the inputs of wide ones adds little to their time; to that of narrow ones it may add as much again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from onward.engine.network.graph_passes import VIEWS, GraphPass, backward_nodes

LEAST_MULTIPLICATIONS = 64
"""Of an element in the forward pass, from which on it may be recomputed. Networks of the census with 4 to 53 of them
gain 2 to 13 % by keeping it, those with 64 and more nothing."""

_ATEN = torch.ops.aten


class KeptOperands(GraphPass):
    """Marks operands in a graph of both passes, before it is cut into the two."""

    def __call__(self, graph: fx.Graph) -> None:
        """Those that are computed in the forward pass and that a product of the backward pass reads."""
        backward = backward_nodes(graph)
        products = [node for node in graph.nodes if getattr(node.target, "overloadpacket", None) in flop_registry]
        multiplications = defaultdict[fx.Node, float](float)
        for node in products:
            for operand in _operands(node) if node not in backward else ():
                multiplications[operand] += _multiplications(node)
        read_again = {operand for node in products if node in backward for operand in _operands(node)}
        for operand in read_again - backward:
            value = operand.meta.get("val")
            if operand.op != "call_function" or not isinstance(value, torch.Tensor):
                continue
            if multiplications[operand] < LEAST_MULTIPLICATIONS * value.numel():
                operand.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _operands(product: fx.Node) -> Iterator[fx.Node]:
    """What a product reads, before its views."""
    for node in product.all_input_nodes:
        while getattr(node.target, "overloadpacket", None) in VIEWS:
            node = node.all_input_nodes[0]
        yield node


def _multiplications(product: fx.Node) -> float:
    """As torch counts them for a product of such shapes; infinite for depthwise convolutions.

    Those take far longer than their multiplications: MobileNet V2 gained nothing by keeping what they read.
    """
    if product.target is _ATEN.convolution.default and product.args[1].meta["val"].shape[1] == 1:  # type: ignore[union-attr]
        return math.inf
    arguments, options = fx.map_arg((product.args, product.kwargs), lambda node: node.meta.get("val"))
    count = flop_registry[product.target.overloadpacket](*arguments, **options, out_val=product.meta.get("val"))  # type: ignore[union-attr]
    return float(count) / 2

"""Scatter-adds (gradients of embeddings and of Gather) are left to torch's kernels on CPUs, which add in a fixed order.

The code that torch's compiler (2.13) generates for several threads adds by atomic operations: in another order each
time, up to six times as slowly, and at wrong places, other tensors among them, where it reads transposed values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from onward.engine.network.graph_passes import GraphPass
from onward.lowering.kernels.dtypes import wide_type

_ADDITIONS = frozenset({torch.ops.aten.index_put, torch.ops.aten._unsafe_index_put})
"""What is left of the gradients of Gather, of Col2Im, and of Scatter with sums, after decomposition."""
_MASKED = torch.ops.aten._unsafe_masked_index_put_accumulate
"""And of embeddings: only where a mask is true, and a position out of range is taken for the nearest."""


class OrderedSums(GraphPass):
    """Replaces each addition at positions by a scatter, in a graph of one pass."""

    def __call__(self, graph: fx.Graph) -> None:
        """`scatter_reduce` is never generated for several threads; for one, it is like what it replaces."""
        for node in list(graph.nodes):
            if (given := _addition(node)) is None:
                continue
            written, mask, positions, values = given
            axes = [axis for axis, one in enumerate(positions) if one is not None]
            tensors = [written, values, *(positions[axis] for axis in axes), *([mask] if mask else [])]
            fakes = [one.meta["val"] for one in tensors]
            if not fakes[0].is_floating_point() or any(one.dtype == torch.bool for one in fakes[2 : 2 + len(axes)]):
                continue
            with fakes[0].fake_mode:
                code = make_fx(functools.partial(_added, axes), decomposition_table=select_decomp_table())(*fakes)
            with graph.inserting_before(node):
                inputs = (one for one in code.graph.nodes if one.op == "placeholder")
                result = graph.graph_copy(code.graph, dict(zip(inputs, tensors, strict=True)))
            node.replace_all_uses_with(result)
            graph.erase_node(node)


def _addition(node: fx.Node) -> tuple[Any, Any, Any, Any] | None:
    """What is written into, the mask, positions and values; None: a node that does not add."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is _MASKED:
        return node.args  # type: ignore[return-value]
    if packet not in _ADDITIONS or not (node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)):
        return None
    return node.args[0], None, node.args[1], node.args[2]


def _added(axes: Sequence[int], written: Tensor, values: Tensor, *rest: Tensor) -> Tensor:
    """`written.index_put(positions of these axes, values, accumulate=True)`, by one scatter along one axis.

    Args:
        axes: that positions are given for.
        written: into a copy of it.
        values: what is added.
        *rest: positions; and a mask, if only some of the values are added.
    """
    positions, masks = rest[: len(axes)], rest[len(axes) :]
    sizes = [written.shape[axis] for axis in axes]
    if masks:
        values = torch.where(masks[0], values, 0)
        positions = tuple(one.clamp(-size, size - 1) for one, size in zip(positions, sizes, strict=True))
    counted = [torch.where(one < 0, one + size, one) for one, size in zip(positions, sizes, strict=True)]
    places = counted[0]
    for size, one in zip(sizes[1:], counted[1:], strict=True):
        places = places * size + one
    # As in NumPy, axes of positions that are apart come first in the values.
    is_adjacent = axes[-1] - axes[0] + 1 == len(axes)
    before = axes[0] if is_adjacent else 0
    others = [axis for axis in range(written.dim()) if axis not in axes]
    order = [*others[:before], *axes, *others[before:]]
    laid = written.permute(order)
    outer, inner = laid.shape[:before], laid.shape[before + len(axes) :]
    rows = values.expand((*outer, *places.shape, *inner)).reshape((*outer, places.numel(), *inner))
    at = places.reshape((-1, *[1] * len(inner))).expand(rows.shape)
    flat = laid.reshape((*outer, math.prod(sizes), *inner))
    wide = wide_type(flat.dtype)  # 16 bits would be rounded at every addition
    summed = flat.to(wide).scatter_reduce(before, at, rows.to(wide), "sum").to(flat.dtype).reshape(laid.shape)
    return summed.permute([order.index(axis) for axis in range(written.dim())])

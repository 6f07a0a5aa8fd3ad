"""Comparisons are recomputed in the compiled backward pass instead of being kept: on a CPU, torch's compiler writes and
reads masks of booleans element by element, 20 ns each, which made ReLU, bounds and choices ten times as slow.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from onward.engine.network.graph_passes import GraphPass

_ATEN = torch.ops.aten
_COMPARISONS = frozenset({
    _ATEN.eq, _ATEN.ge, _ATEN.gt, _ATEN.isinf, _ATEN.isnan, _ATEN.le, _ATEN.logical_and, _ATEN.logical_not,
    _ATEN.logical_or, _ATEN.logical_xor, _ATEN.lt, _ATEN.ne, _ATEN.bitwise_and, _ATEN.bitwise_not, _ATEN.bitwise_or,
    _ATEN.bitwise_xor,
})  # fmt: skip
"""Elementwise operators that give booleans."""


class RecomputedMasks(GraphPass):
    """Marks comparisons in a graph of both passes, before it is cut into the two."""

    def __call__(self, graph: fx.Graph) -> None:
        """What they compare is kept instead, where it is not kept anyway."""
        for node in graph.nodes:
            value = node.meta.get("val")
            is_mask = isinstance(value, torch.Tensor) and value.dtype == torch.bool
            if is_mask and getattr(node.target, "overloadpacket", None) in _COMPARISONS:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

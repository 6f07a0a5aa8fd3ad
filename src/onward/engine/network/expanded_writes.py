"""Expanded tensors, whose elements share memory, are cloned before anything is scattered into them.

torch's compiler (2.13) writes into the tensor itself where nothing reads it afterwards, and does not look whether one
place in memory is several elements: the others change, too, without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onward.engine.network.graph_passes import GraphPass

_ATEN = torch.ops.aten
_WRITES = frozenset({
    _ATEN._unsafe_index_put, _ATEN.as_strided_scatter, _ATEN.diagonal_scatter, _ATEN.index_put, _ATEN.select_scatter,
    _ATEN.slice_scatter,
})  # fmt: skip
"""What is left of ScatterND, ScatterElements, and the backward passes of both, when the compiler looks for writes."""


class CopiedExpansions(GraphPass):
    """Copies what is written into, in a graph of one pass, before the compiler chooses where to write."""

    def __call__(self, graph: fx.Graph) -> None:
        """Each write has a copy of its own, which the compiler may write into."""
        for node in list(graph.nodes):
            if getattr(node.target, "overloadpacket", None) not in _WRITES:
                continue
            written = node.args[0]
            if shares_memory_with_itself(written.meta.get("val")):
                with graph.inserting_before(node):
                    copy = graph.call_function(
                        _ATEN.clone.default, (written,), {"memory_format": torch.contiguous_format}
                    )
                copy.meta["val"] = written.meta["val"].contiguous()
                node.update_arg(0, copy)


def shares_memory_with_itself(value: Any) -> bool:
    """Whether two elements of a tensor are one place in memory, as far as strides of zero tell."""
    if not isinstance(value, torch.Tensor):
        return False
    return any(stride == 0 and size != 1 for size, stride in zip(value.shape, value.stride(), strict=True))

"""The hyperbolic tangent of many numbers is computed by torch's kernel on CPUs, between the kernels that its compiler
generates: those compute it by Sleef, at a quarter of the speed.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from onward.engine.network.graph_passes import GraphPass

LEAST_ELEMENTS = 2**15
"""Of fewer, calling the kernel and passing numbers on through memory take longer than what it saves."""
_DTYPES = (torch.float32, torch.float64)

_library = torch.library.Library("onward", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("tanh(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("tanh", torch.tanh, "CPU")  # type: ignore[no-untyped-call]
_library.impl("tanh", torch.empty_like, "Meta")  # type: ignore[no-untyped-call]


class NativeTanh(GraphPass):
    """Replaces `tanh` in a graph of one pass."""

    def __call__(self, graph: fx.Graph) -> None:
        """torch's own are as fast as its library for vectors, MKL, which some builds of torch have not."""
        if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
            return
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
            value = node.meta["val"]
            if isinstance(value, Tensor) and value.dtype in _DTYPES and value.numel() >= LEAST_ELEMENTS:
                node.target = torch.ops.onward.tanh.default

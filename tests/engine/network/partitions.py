"""Runs a function whose graph of both passes is changed, then cut in two as torch's compiler does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes

from onward.engine.network.graph_passes import GraphPass


class Cut(NamedTuple):
    """What came of it: a result, gradients, and what the forward pass hands to the backward pass."""

    result: Tensor
    gradients: tuple[Tensor, ...]
    handed: list[Tensor]


def run_cut(function: Callable[..., Tensor], inputs: Sequence[Tensor], *passes: GraphPass) -> Cut:
    """The gradients are those of inputs that require them; what is handed over has no numbers."""
    handed = list[Tensor]()

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        with torch._inductor.config.patch(fallback_random=True):  # others need its code generation around them
            joint_graph_passes(joint)
        for one in passes:
            one(joint.graph)
        found = min_cut_rematerialization_partition(joint, inputs, **options)
        (output,) = (node for node in found[0].graph.nodes if node.op == "output")
        handed.extend(node.meta["val"] for node in output.args[0][1:])
        return found

    def keep(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return make_boxed_func(gm.forward)

    compiled = aot_function(
        function, fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=select_decomp_table()
    )
    torch.manual_seed(0)
    result = compiled(*inputs)
    gradients = torch.autograd.grad(result.sum(), [one for one in inputs if one.requires_grad])
    return Cut(result.detach(), gradients, handed)

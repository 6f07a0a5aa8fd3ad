"""Masks are made again in the backward pass: none is handed over, and gradients are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table

from onward.engine.network.recomputed_masks import RecomputedMasks

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: F.relu(x + 1) * 2,
    "leaky relu": lambda x: F.leaky_relu(x + 1, 0.1) * 2,
    "bounds": lambda x: (x + 1).clamp(-0.5, 0.5) * 2,
    "a choice": lambda x: torch.where((x > 0) & ~(x > 1), x * 2, x * 3),
    "dropout": lambda x: F.dropout(x.sin(), 0.5) * 2,
}


def run(function: Callable[[Tensor], Tensor], is_marked: bool) -> tuple[Tensor, Tensor, list[torch.dtype]]:
    """Result, gradient, and the types of what the forward pass hands to the backward pass."""
    handed = list[torch.dtype]()

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        if is_marked:
            RecomputedMasks()(joint.graph)
        found = min_cut_rematerialization_partition(joint, inputs, **options)
        (output,) = (node for node in found[0].graph.nodes if node.op == "output")
        handed.extend(node.meta["val"].dtype for node in output.args[0][1:])
        return found

    def keep(code: fx.GraphModule, _: Any) -> Callable[..., Any]:
        return make_boxed_func(code.forward)  # type: ignore[no-any-return]

    compiled = aot_function(
        function, fw_compiler=keep, bw_compiler=keep, partition_fn=partition, decompositions=select_decomp_table()
    )
    x = torch.linspace(-3, 3, 40).view(4, 10).requires_grad_()
    torch.manual_seed(0)
    result = compiled(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    return result.detach(), gradient, handed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_mask_is_handed_over(name: str) -> None:
    result, gradient, handed = run(FUNCTIONS[name], is_marked=True)
    before, gradient_before, handed_before = run(FUNCTIONS[name], is_marked=False)
    assert torch.bool in handed_before  # what would be written element by element
    assert torch.bool not in handed
    assert torch.equal(result, before)
    assert torch.equal(gradient, gradient_before)


def test_a_changed_pass_is_another_one_to_torchs_cache() -> None:
    assert RecomputedMasks().uuid() == RecomputedMasks().uuid()
    assert len(RecomputedMasks().uuid()) == 32

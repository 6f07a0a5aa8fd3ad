"""Gradients of rows that are looked up many times: in 16 bits as well as 16 bits can hold them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from onward.lowering.kernels.embeddings import look_up
from onward.lowering.ops.fused_embedding_bag import embedding_bag
from onward.lowering.ops.indexing import gather, gather_nd

ROWS, LOOKUPS = 5, 4000
POSITIONS = torch.randint(0, ROWS, (LOOKUPS // 4, 4), generator=torch.Generator().manual_seed(0))
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "one by one": lambda table: look_up(table, POSITIONS),
    "numbers": lambda table: gather(table[:, 0], POSITIONS),
    "numbers of several axes": lambda table: gather_nd(table, torch.stack([POSITIONS, POSITIONS], -1)),
    "in bags": lambda table: embedding_bag(table, POSITIONS),
    "in bags, means": lambda table: embedding_bag(table, POSITIONS, mode="mean"),
    "in bags, weighed": lambda table: embedding_bag(
        table, POSITIONS.flatten(), torch.tensor([0, 1, 900, 4000]), (POSITIONS.flatten() % 2 + 1).to(table.dtype)
    ),
    "in bags, maxima": lambda table: embedding_bag(table, POSITIONS, mode="max"),
    "in bags of several sizes": lambda table: embedding_bag(
        table, POSITIONS.flatten(), torch.tensor([0, 1, 900, 4000])
    ),
}


@pytest.mark.parametrize("width", [8, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_of_many_lookups_is_rounded_once(way: str, dtype: torch.dtype, width: int) -> None:
    """By half a unit in the last place, and what additions in float32 lose; one after the other loses 20 % here."""
    torch.manual_seed(0)
    wide = torch.rand(ROWS, width, dtype=dtype).double().requires_grad_()
    table = wide.detach().to(dtype).requires_grad_()
    result = WAYS[way](table)
    direction = torch.rand_like(result)
    (gradient,) = torch.autograd.grad(result, table, direction)
    (expected,) = torch.autograd.grad(WAYS[way](wide), wide, direction.double())
    assert gradient.dtype == dtype
    bound = torch.finfo(dtype).eps / 2 + LOOKUPS * 2**-24
    torch.testing.assert_close(gradient.double(), expected, rtol=bound, atol=0.0)

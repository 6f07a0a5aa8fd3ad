"""Attention of a rank's queries is that of all queries, in the order of the rank's tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onward.parallel.context.attention import context_attention
from onward.parallel.context.collectives import own_part
from onward.plan.context.ranges import TokenAxis


@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "keys"])
@pytest.mark.parametrize("length", [8, 7])
def test_every_rank_computes_its_rows(length: int, mask: str, is_causal: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, length, 8)
    k, v = k[:, :2], v[:, :2]
    masks = {
        "none": None,
        "bool": torch.rand(2, 1, length, length) > 0.3,
        "float": torch.randn(4, length, length),
        "keys": torch.randn(2, 1, 1, length),
    }
    given = masks[mask]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if given is not None and given.dtype == torch.bool:
        given[..., 0] = True
    full = (
        given
        if not is_causal
        else seen
        if given is None
        else given & seen
        if given.dtype == torch.bool
        else (given.masked_fill(~seen, -torch.inf))
    )
    expected = F.scaled_dot_product_attention(q, k, v, full, scale=0.3, enable_gqa=True)
    tokens = TokenAxis((length,))
    for rank in range(2):
        is_by_row = given is not None and given.shape[-2] > 1
        found = context_attention(
            own_part(q, 2, tokens, rank, 2), k, v,
            own_part(given, given.dim() - 2, tokens, rank, 2) if is_by_row and given is not None else given,
            scale=0.3, is_causal=is_causal, ranks=2, query_blocks=(length,), context_rank=rank, context_group="",
            training=True,
        )  # fmt: skip
        assert torch.allclose(found, own_part(expected, 2, tokens, rank, 2), atol=1e-6)

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


@pytest.mark.parametrize("is_causal", [0, 1])
def test_dropout_leaves_all_generators_in_step_where_ranks_have_different_numbers_of_chunks(is_causal: int) -> None:
    """Of 12 tokens, the first two of four ranks have one chunk, the others two."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 8, 64, 12, 4).unbind()
    v, tokens, states, found = torch.ones(8, 64, 12, 4), TokenAxis((12,)), [], []
    assert [tokens.local_length(rank, 4) for rank in range(4)] == [2, 2, 4, 4]
    settings = {"scale": 0.3, "is_causal": is_causal, "dropout_ratio": 0.25, "ranks": 4, "query_blocks": (12,)}
    for rank in range(4):
        torch.manual_seed(5)
        own = own_part(q, 2, tokens, rank, 4)
        found.append(context_attention(own, k, v, **settings, context_rank=rank, context_group="", training=True))  # type: ignore[arg-type]
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)
    assert not torch.equal(found[2], found[3])
    assert float(torch.cat(found, 2).mean()) == pytest.approx(1, abs=0.02), "of probabilities, which add up to 1"

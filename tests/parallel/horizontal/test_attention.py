"""Fused attention of a rank's heads: dropped differently on every rank, compiled or not."""

from __future__ import annotations

import torch

from onward.lowering.ops.fused_attention import attention
from onward.parallel.horizontal.attention import attention_of_part


def test_fused_attention_drops_differently_on_every_rank() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 4).unbind(0)
    cut = {"cut_axis": 1, "blocks": (4,), "size": 2, "scale": 0.5, "dropout_ratio": 0.5}
    results, states = [], []
    for rank, training in ((0, True), (1, True), (0, False), (1, False)):
        torch.manual_seed(5)
        results.append(attention_of_part(q, k, v, rank=rank, training=training, **cut))
        states.append(torch.get_rng_state())
    assert not torch.equal(results[0], results[1])
    assert torch.equal(states[0], states[1])
    assert torch.equal(results[2], results[3])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.5)
    torch.testing.assert_close(results[2], expected)


def test_compiled_attention_drops_as_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 6, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, 6, 8, generator=generator).unbind(0)
    mask = torch.rand(2, 1, 6, 6, generator=generator) < 0.7
    mask[1, 0, 2] = False
    seen = mask.any(-1, keepdim=True)
    opened = mask | ~seen
    cut = {"cut_axis": 1, "blocks": (8,), "size": 2, "rank": 1, "scale": 0.3, "training": True}
    compiled = torch.compile(attention_of_part, backend="eager", fullgraph=True)
    for empty in ("uniform", "zero"):
        torch.manual_seed(5)
        found = compiled(q, k, v, opened, seen, dropout_ratio=1e-9, empty_rows=empty, **cut)
        expected = attention(q, k, v, opened, seen, scale=0.3, empty_rows=empty, training=False)
        torch.testing.assert_close(found, expected)
    torch.manual_seed(5)
    causal = compiled(q, k, v, is_causal=1, dropout_ratio=1e-9, **cut)
    torch.testing.assert_close(causal, attention(q, k, v, is_causal=1, scale=0.3, training=False))
    torch.manual_seed(5)
    assert not torch.equal(compiled(q, k, v, is_causal=1, dropout_ratio=0.5, **cut), causal)

"""Chunks in which the fused cross entropy is computed."""

from __future__ import annotations

import pytest
import torch

import onward.lowering.ops.fused_cross_entropy as fused_cross_entropy


@pytest.mark.parametrize("rows", [0, 200, 600])
def test_chunks_on_a_cpu_have_256_rows_or_8_mib(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows at all give no loss and gradients of zero; chunks are summed up to what one would give."""
    monkeypatch.undo()
    classes, width = 2**14, 4
    assert fused_cross_entropy.rows_of_chunk("cpu", torch.empty(classes, width)) == 256
    assert fused_cross_entropy.rows_of_chunk("cpu", torch.empty(512, 5)) == 8 * 2**20 // (4 * 512)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, width, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    loss = fused_cross_entropy.linear_cross_entropy(hidden, weight, labels, reduction="sum")
    found = torch.autograd.grad(loss, (hidden, weight))
    expected_loss = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    expected = torch.autograd.grad(expected_loss, (hidden, weight))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

"""Fused attention itself, against the formula in float64: types, autocast, wider masks, queries without keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from onward.lowering.ops.fused_attention import attention, opened_mask, visible_rows

GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, 4, 6, 8, generator=GENERATOR, dtype=torch.float64) for _ in range(3))
CAUSAL = torch.zeros(6, 6, dtype=torch.float64).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf)


def formula(mask: Tensor) -> Tensor:
    return torch.softmax(Q @ K.mT * 0.3 + mask, -1) @ V


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)],
)
def test_types(dtype: torch.dtype, bound: float) -> None:
    result = attention(Q.to(dtype), K.to(dtype), V.to(dtype), CAUSAL.to(dtype), scale=0.3, training=False)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), formula(CAUSAL), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_its_type_and_no_worse_numbers_than_the_formula(dtype: torch.dtype) -> None:
    q, k, v, mask = Q.float(), K.float(), V.float(), CAUSAL.float()
    with torch.autocast("cpu", dtype=dtype):
        result = attention(q, k, v, mask, scale=0.3, training=False)
        written = torch.softmax(q @ k.mT * 0.3 + mask, -1) @ v
    assert result.dtype == dtype
    exact = formula(CAUSAL)
    assert (result.double() - exact).norm() <= (written.double() - exact).norm()


def test_float64_under_autocast_stays_float64() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = attention(Q, K, V, CAUSAL, scale=0.3, training=False)
    torch.testing.assert_close(result, formula(CAUSAL), rtol=1e-12, atol=1e-12)


def test_the_lowest_float32_number_stays_finite_in_float16() -> None:
    """As minus infinity it would make a row that is hidden throughout NaN, or zero."""
    mask = torch.full((6, 6), torch.finfo(torch.float32).min)
    with torch.autocast("cpu", dtype=torch.float16):
        result = attention(Q.float(), K.float(), V.float(), mask, scale=0.3, training=False)
    expected = V.mean(2, keepdim=True).expand_as(V)
    # -65504 swallows scores only to its own rounding of 32; a row keeps a little of them.
    assert bool(result.isfinite().all())
    assert (result.double() - expected).abs().max() < 2.0


@pytest.mark.parametrize("empty", ["uniform", "zero", "nan"])
def test_queries_without_keys(empty: str) -> None:
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[0, :, 3] = False
    q = Q.clone().requires_grad_()
    opened, seen = opened_mask(mask), visible_rows(mask)
    result = attention(q, K, V, opened, seen, scale=0.3, empty_rows=empty, training=False)
    row = result[0, :, 3]
    expected = {"uniform": V[0].mean(1), "zero": torch.zeros_like(row), "nan": torch.full_like(row, math.nan)}[empty]
    torch.testing.assert_close(row, expected, equal_nan=True, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result[1], formula(torch.where(mask, 0.0, -math.inf))[1], rtol=1e-12, atol=1e-12)
    result.nansum().backward()
    assert q.grad is not None
    assert bool((q.grad[0, :, 3] == 0).all())


def test_masks_of_floats_are_opened_too() -> None:
    mask = CAUSAL.clone()
    mask[2] = -math.inf
    assert visible_rows(mask).squeeze(-1).tolist() == [True, True, False, True, True, True]
    assert opened_mask(mask)[2].tolist() == [0.0] * 6
    assert torch.equal(opened_mask(mask)[3], CAUSAL[3])


def test_grouped_heads() -> None:
    few_k, few_v = K[:, :2], V[:, :2]
    result = attention(Q, few_k, few_v, scale=0.3, is_causal=1, training=False)
    repeated = torch.softmax(Q @ few_k.repeat_interleave(2, 1).mT * 0.3 + CAUSAL, -1) @ few_v.repeat_interleave(2, 1)
    torch.testing.assert_close(result, repeated, rtol=1e-12, atol=1e-12)

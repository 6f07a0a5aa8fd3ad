"""Calls with known arguments become simpler only where the result stays the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from onward.lowering.ops.convolution import conv, conv_transpose
from onward.lowering.ops.fused_attention import attention
from onward.lowering.simplification import simpler_arguments

Q, K, V = (torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(i)) for i in range(3))
CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()


def simpler(mask: torch.Tensor, seen: torch.Tensor | None = None, seen_known: bool = True) -> dict[str, object] | None:
    """Which of mask, seen rows and causality the simpler call has."""
    arguments = ("q", "k", "v", mask, seen)
    known = {id(mask): mask, **({id(seen): seen} if seen_known else {})}
    keywords = {"scale": 0.5, "training": False}
    found = simpler_arguments(attention, arguments, keywords, lambda argument: known.get(id(argument)), {})
    if found is None:
        return None
    mask_left, seen_left = (*found[0][3:], None, None)[:2]
    return {"mask": mask_left is not None, "seen": seen_left is not None, "causal": bool(found[1].get("is_causal", 0))}


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL,
        CAUSAL.expand(2, 1, 4, 4),
        torch.zeros(1, 1, 4, 4).masked_fill(~CAUSAL, -math.inf),
        torch.zeros(4, 4).masked_fill(~CAUSAL, -10000.0).bfloat16(),
    ],
    ids=["bool", "for each sample", "minus infinity", "bf16"],
)
def test_causal(mask: torch.Tensor) -> None:
    assert simpler(mask) == {"mask": False, "seen": False, "causal": True}
    given = mask if mask.dtype == torch.bool else mask.float()
    expected = attention(Q, K, V, given, scale=0.5, training=False)
    torch.testing.assert_close(attention(Q, K, V, scale=0.5, is_causal=1, training=False), expected)


def test_a_mask_that_hides_nothing() -> None:
    assert simpler(torch.ones(1, 4, dtype=torch.bool)) == {"mask": False, "seen": False, "causal": False}
    assert simpler(torch.zeros(4, 4)) == {"mask": False, "seen": False, "causal": False}


@pytest.mark.parametrize(
    "mask",
    [
        CAUSAL.T,
        CAUSAL[1:],
        torch.ones(1, 4, dtype=torch.bool).tril(),
        torch.zeros(4, 4).masked_fill(~CAUSAL, -100.0),
        torch.full((4, 4), 0.5).masked_fill(~CAUSAL, -math.inf),
        torch.zeros(4, 4).masked_fill(torch.ones(4, 4, dtype=torch.bool).tril(-1).T, -math.inf).fill_(-math.inf),
    ],
    ids=["the other triangle", "from the end", "one row for all", "low, but not hidden", "a bias", "nothing seen"],
)
def test_other_masks_stay(mask: torch.Tensor) -> None:
    assert simpler(mask) is None


def test_rows_without_keys_stay() -> None:
    seen = torch.tensor([True, True, False, True]).unsqueeze(-1)
    assert simpler(CAUSAL, seen) is None
    assert simpler(CAUSAL, torch.ones_like(seen)) == {"mask": False, "seen": False, "causal": True}
    assert simpler(CAUSAL, torch.ones_like(seen), seen_known=False) is None


@pytest.mark.parametrize("function", [conv, conv_transpose])
def test_a_bias_of_zeros_is_not_added(function: Callable[..., torch.Tensor]) -> None:
    """Only one that is known, and a constant: all zeros."""
    image, weight = torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)
    zeros, others = torch.zeros(2), torch.tensor([0.0, 1e-30])

    def simpler_with(bias: torch.Tensor | None, known: torch.Tensor | None) -> object:
        def lookup(argument: object) -> object:
            return known if argument is bias else None

        return simpler_arguments(function, (image, weight, bias), {}, lookup, {})

    assert simpler_with(zeros, zeros) == ((image, weight, None), {})
    assert simpler_with(zeros, None) is None
    assert simpler_with(others, others) is None
    torch.testing.assert_close(function(image, weight, zeros), function(image, weight), rtol=0, atol=0)


def test_functions_without_a_rule() -> None:
    assert simpler_arguments(torch.add, (Q, K), {}, lambda argument: argument, {}) is None

"""Rules of products and convolutions: what cannot be computed on shards, in words."""

from __future__ import annotations

import pytest

from onward.plan.shards import Sharding
from tests.plan.horizontal.nodes import COLUMNS, IMAGE, Case, X, assert_said, site

CASES: dict[str, Case] = {
    "equation": (
        site("Einsum", {**X, "w": (8, 3)}, {"y": (4, 3)}, equation="ij,jk"), COLUMNS, {},
        "the equation 'ij,jk' leaves axes out",
    ),
    "packed": (
        site("MultiHeadAttention", {"qkv": (2, 3, 2, 3, 4)}, {"y": (2, 3, 8)}, domain="com.microsoft", num_heads=2),
        {0: Sharding(2, (2,))}, {}, "has packed operands, masks or a past",
    ),
    "groups convolved": (
        site("Conv", {"x": IMAGE, "w": (8, 4, 1, 1)}, {"y": IMAGE}, group=2), {0: Sharding(1, (6, 2))}, {},
        "a group of channels would be split",
    ),
    "groups by samples": (
        site("Conv", {"x": IMAGE, "w": (8, 4, 1, 1)}, {"y": IMAGE}, group=2), {0: Sharding(0, (2,))}, {},
        "is sharded along other axes than its groups",
    ),
    "picked": (
        site("Gather", {**X, "i": (2,)}, {"y": (4, 2)}, axis=1), COLUMNS, {}, "picks elements of the sharded axis",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_cut_says_why(case: str) -> None:
    assert_said(CASES[case])

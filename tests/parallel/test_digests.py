"""Digests: every bit counts, and the minority is named."""

from __future__ import annotations

import pytest
import torch

from onward.parallel.digests import Difference, Replicas, digest, find_differing, find_replicas


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_every_bit_changes_a_digest(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 7).to(dtype)
    whole, words = int(digest(tensor)), tensor.view(-1).view(torch.uint8)
    for place in range(0, len(words), 3):
        for bit in range(8):
            words[place] ^= 1 << bit
            assert int(digest(tensor)) != whole
            words[place] ^= 1 << bit
    assert int(digest(tensor)) == int(digest(tensor.clone().t().contiguous().t())) == whole
    assert int(digest(torch.zeros(0, dtype=dtype))) == 0


def test_the_minority_is_named_where_there_is_one() -> None:
    held = [[("a", "all"), ("b", "left")], [("a", "all"), ("b", "right")], [("a", "all"), ("b", "left")]]
    replicas = find_replicas(held)
    assert replicas == [Replicas("a", {0: 0, 1: 0, 2: 0}), Replicas("b", {0: 1, 2: 1})]
    assert find_differing(torch.tensor([[1, 5], [1, 6], [1, 5]]), replicas) == []
    found = find_differing(torch.tensor([[1, 5], [2, 6], [1, 7]]), replicas)
    assert found == [Difference("a", (1,), (0, 1, 2)), Difference("b", (0, 2), (0, 2))]
    assert find_differing(torch.tensor([[1, 5], [2, 6], [3, 5]]), replicas) == [Difference("a", (0, 1, 2), (0, 1, 2))]

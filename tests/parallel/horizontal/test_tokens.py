"""Tokens of several ranks: as many as can be divided among them."""

from __future__ import annotations

import pytest
import torch

from onward.parallel.horizontal.tokens import own_tokens


def test_tokens_that_cannot_be_shared_are_counted() -> None:
    with pytest.raises(ValueError, match="5 tokens cannot be divided among 2 tensor-parallel ranks; pad the sequences"):
        own_tokens(torch.zeros(2, 5, 3), cut_axis=1, blocks=(), rank=0, size=2, horizontal_group="")

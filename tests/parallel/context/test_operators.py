"""Sizes of parts and of full values, and the refusal of batches that a plan was not made for."""

from __future__ import annotations

import pytest
import torch

from onward.parallel.context.operators import full_sizes, local_sizes, take_part

CUT = {"ranks": 2, "position": 1, "context_rank": 0}


def test_sizes_of_a_part_are_those_of_the_rank_and_back() -> None:
    for sizes, blocks, samples, own in (
        ((2, 8, 4), (8,), "none", 4),
        ((2, 7, 4), (7,), "none", 3),
        ((2, 24, 4), (8,), "outer", 12),
        ((2, 21, 4), (7,), "inner", 9),
        ((2, 8, 4), (1, 7), "none", 4),
    ):
        assert local_sizes(sizes, blocks=blocks, samples=samples, **CUT) == (2, own, 4)
        assert full_sizes((2, own, 4), blocks=blocks, samples=samples, **CUT) == sizes
    for kept in (-1, 0, 1):
        assert local_sizes((2, kept), blocks=(8,), **CUT) == (2, kept)


def test_the_end_of_a_slice_is_that_of_the_ranks_part() -> None:
    """Also where it is counted from the end: -1 of a sequence of 8 is the end of only the rank that has the last."""
    for rank, own in ((0, 3), (1, 4)):
        settings = {**CUT, "position": 0, "context_rank": rank}
        assert local_sizes((-1,), blocks=(7,), is_end=1, **settings) == (own,)
        (end,) = local_sizes((14,), blocks=(7,), samples="outer", is_end=1, **settings)
        assert end > 10**9, "all samples of a batch of any number"


def test_parts_are_of_the_first_and_the_last_tokens() -> None:
    x = torch.arange(16).reshape(2, 8)
    parts = [take_part(x, cut_axis=1, blocks=(8,), ranks=2, context_rank=rank) for rank in range(2)]
    assert parts[0][0].tolist() == [0, 1, 6, 7]
    assert parts[1][0].tolist() == [2, 3, 4, 5]
    with pytest.raises(
        ValueError, match=r"planned for sequences of 8, but this batch has 6\. Pad or cut all sequences"
    ):
        take_part(x[:, :6], cut_axis=1, blocks=(8,), ranks=2, context_rank=0)

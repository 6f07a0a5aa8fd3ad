"""Every token is on one rank, and ranks have equally many earlier tokens to look at."""

from __future__ import annotations

import pytest

from onward.plan.context.ranges import blocks_of, local_size, ranges_of


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("block", [1, 7, 8, 17, 24, 197])
def test_ranks_share_all_elements_of_a_block(block: int, size: int) -> None:
    held = [index for rank in range(size) for start, end in ranges_of(block, rank, size) for index in range(start, end)]
    assert sorted(held) == list(range(block))
    assert sum(local_size((block, block), rank, size) for rank in range(size)) == 2 * block


def test_ranks_have_equal_parts_of_a_causal_attention() -> None:
    work = [sum(sum(range(start + 1, end + 1)) for start, end in ranges_of(48, rank, 4)) for rank in range(4)]
    assert len(set(work)) == 1


def test_a_sequence_without_its_last_elements_has_the_same_borders() -> None:
    for rank in range(4):
        full = [index for start, end in ranges_of(64, rank, 4) for index in range(start, end)]
        short = [index for start, end in ranges_of(63, rank, 4) for index in range(start, end)]
        assert short == [index for index in full if index < 63]


def test_a_batch_of_more_samples_has_more_blocks_and_one_of_another_length_is_refused() -> None:
    assert blocks_of(24, (8, 8)) == (8, 8, 8)
    for length, blocks in ((7, (8,)), (16, (8,)), (20, (8, 8)), (9, (1, 7))):
        with pytest.raises(
            ValueError, match=rf"planned for sequences of {blocks[0]}, but this batch has {length}\. Pad"
        ):
            blocks_of(length, blocks)

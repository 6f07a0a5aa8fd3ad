"""Every token is on one rank, and ranks have equally many earlier tokens to look at."""

from __future__ import annotations

import pytest

from onward.plan.context.ranges import TokenAxis, TokenCut, axis_of, local_size, ranges_of


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
    assert TokenAxis((8,), 1, "outer").of_length(24) == TokenAxis((8, 8, 8))
    assert TokenAxis((8,), 1, "inner").of_length(24) == TokenAxis((8,), 3)
    for samples, length in (("none", 7), ("none", 16), ("outer", 20), ("inner", 9)):
        with pytest.raises(ValueError, match=rf"planned for sequences of 8, but this batch has {length}\. Pad"):
            TokenAxis((8,), 1, samples).of_length(length)


@pytest.mark.parametrize("samples", ["outer", "inner"])
@pytest.mark.parametrize("batch", [1, 3])
def test_parts_of_merged_samples_are_the_same_tokens_of_each(samples: str, batch: int) -> None:
    axis = TokenAxis((7,), 1, samples).of_length(7 * batch)
    assert axis.length == 7 * batch
    for rank in range(2):
        own = axis.local_length(rank, 2)
        assert own == batch * local_size((7,), rank, 2)
        assert TokenAxis((7,), 1, samples).of_part(own, rank, 2) == axis


def test_what_has_the_samples_of_a_batch_is_known_by_their_number() -> None:
    assert axis_of(TokenCut(0, (8,)), 5) == TokenAxis((8,))
    assert axis_of(TokenCut(0, (8,) * 10), 5) == TokenAxis((8, 8), 1, "outer")
    assert axis_of(TokenCut(0, (80,), (), 10), 5) == TokenAxis((8,), 2, "inner")
    assert axis_of(TokenCut(0, (80,), (), 10), 0) == TokenAxis((8,), 10)
    assert axis_of(TokenCut(0, (40,)), 5) is None, "tokens of several samples in one sequence"

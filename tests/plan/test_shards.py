"""Weight shards: the boxes of all ranks cover a weight exactly once, and joining the parts gives it back."""

import numpy as np
import pytest

from onward.plan.shards import Box, WeightShard, cut, join_parts, take_part


def test_fused_projection_gives_each_rank_its_share_of_every_block() -> None:
    shard = WeightShard(1, (4, 2, 2))
    assert shard.boxes((3, 8), 1, 2) == (
        Box((0, 2), (3, 2), (0, 0)),
        Box((0, 5), (3, 1), (0, 2)),
        Box((0, 7), (3, 1), (0, 3)),
    )
    whole = np.arange(24).reshape(3, 8)
    np.testing.assert_array_equal(take_part(whole, shard, 1, 2), whole[:, [2, 3, 5, 7]])
    assert shard.local_shape((3, 8), 1, 2) == (3, 4)


@pytest.mark.parametrize(
    ("shape", "axis", "blocks", "size"),
    [
        ((6,), 0, (6,), 2),
        ((5, 12), 1, (4, 4, 4), 4),
        ((12, 5, 2), 0, (8, 2, 2), 2),
        ((11, 3), 0, (11,), 4),
        ((3,), 0, (3,), 4),
    ],
)
def test_parts_of_all_ranks_make_the_whole(
    shape: tuple[int, ...], axis: int, blocks: tuple[int, ...], size: int
) -> None:
    shard = WeightShard(axis, blocks)
    whole = np.random.default_rng(0).permutation(int(np.prod(shape))).reshape(shape)
    parts = [take_part(whole, shard, rank, size) for rank in range(size)]
    np.testing.assert_array_equal(join_parts(parts, shard), whole)
    covered = np.zeros(shape, int)
    for rank in range(size):
        for box in shard.boxes(shape, rank, size):
            covered[box.whole_slices] += 1
    assert (covered == 1).all()


def test_uneven_parts_differ_by_one_element_at_most() -> None:
    sizes = [WeightShard(0, (50257,)).local_size(rank, 4) for rank in range(4)]
    assert sum(sizes) == 50257
    assert max(sizes) - min(sizes) == 1


def test_wrong_blocks_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks \[4\] of axis 0 do not make up \[5, 2\]"):
        WeightShard(0, (4,)).boxes((5, 2), 0, 2)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        WeightShard(0, (4,)).boxes((4,), 2, 2)
    with pytest.raises(ValueError, match=r"rank 1 holds \[3\]; expected \[2\]"):
        join_parts([np.zeros(2), np.zeros(3)], WeightShard(0, (4,)))


def test_nothing_is_cut_without_a_shard() -> None:
    whole = np.arange(6)
    assert take_part(whole, None, 1, 2) is whole
    assert join_parts([whole, whole], None) is whole


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 11])
def test_rows_of_a_part_are_the_boxes_of_those_rows(axis: int, parts: int) -> None:
    """ZeRO on top of a fused horizontal shard: every row part is made of its boxes and of nothing else."""
    whole = np.random.default_rng(0).permutation(200).reshape(10, 20)
    shard = WeightShard(axis, (4, 2, 4) if axis == 0 else (8, 4, 8))
    local = take_part(whole, shard, 1, 2)
    boxes = shard.boxes(whole.shape, 1, 2)
    rows = -(-local.shape[0] // parts)
    for part in range(parts):
        start, stop = min(part * rows, local.shape[0]), min((part + 1) * rows, local.shape[0])
        expected = local[start:stop]
        found = np.full(expected.shape, -1)
        for box in cut(boxes, start, stop):
            assert (found[box.local_slices] == -1).all()
            found[box.local_slices] = whole[box.whole_slices]
        np.testing.assert_array_equal(found, expected)


def test_no_rows_are_no_boxes() -> None:
    assert cut(WeightShard(0, (4,)).boxes((4, 3), 0, 2), 2, 2) == ()
    assert cut((), 0, 5) == ()

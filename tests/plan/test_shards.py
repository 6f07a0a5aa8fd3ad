"""Shards: those of all ranks cover a weight exactly once, and joining them gives it back."""

import numpy as np
import pytest

from onward.plan.shards import Sharding, TensorShard, cut, take_shard


def _joined(held: list[np.ndarray], sharding: Sharding, whole: np.ndarray) -> np.ndarray:
    """What the ranks hold, each shard written to its place."""
    joined = np.full_like(whole, -1)
    for rank, array in enumerate(held):
        for shard in sharding.shards(whole.shape, rank, len(held)):
            joined[shard.slices] = array[shard.local_slices]
    return joined


def test_fused_projection_gives_each_rank_its_share_of_every_block() -> None:
    sharding = Sharding(1, (4, 2, 2))
    assert sharding.shards((3, 8), 1, 2) == (
        TensorShard((0, 2), (3, 2), (0, 0)),
        TensorShard((0, 5), (3, 1), (0, 2)),
        TensorShard((0, 7), (3, 1), (0, 3)),
    )
    whole = np.arange(24).reshape(3, 8)
    np.testing.assert_array_equal(take_shard(whole, sharding, 1, 2), whole[:, [2, 3, 5, 7]])
    assert sharding.local_shape((3, 8), 1, 2) == (3, 4)


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
    sharding = Sharding(axis, blocks)
    whole = np.random.default_rng(0).permutation(int(np.prod(shape))).reshape(shape)
    parts = [take_shard(whole, sharding, rank, size) for rank in range(size)]
    covered = np.zeros(shape, int)
    for rank in range(size):
        for shard in sharding.shards(shape, rank, size):
            covered[shard.slices] += 1
    assert (covered == 1).all()
    np.testing.assert_array_equal(_joined(parts, sharding, whole), whole)


@pytest.mark.parametrize(("parts", "copies"), [((0, 1), (1, 4)), ((0, 2), (1, 2)), ((0, 4), (1, 1)), ((0, 8), (1, 1))])
def test_blocks_of_fewer_parts_than_ranks_are_held_by_several_of_them(
    parts: tuple[int, ...], copies: tuple[int, ...]
) -> None:
    sharding, whole = Sharding(1, (16, 8), parts), np.arange(72).reshape(3, 24)
    held = [take_shard(whole, sharding, rank, 4) for rank in range(4)]
    np.testing.assert_array_equal(_joined(held, sharding, whole), whole)
    counted = np.zeros_like(whole)
    for rank in range(4):
        shards = sharding.shards(whole.shape, rank, 4)
        assert [one.replica for one in shards] == [(rank % c, c) for c in copies]
        assert held[rank].shape == sharding.local_shape(whole.shape, rank, 4) == (3, 4 + 2 * copies[1])
        for shard in cut(shards, 1, 3):
            counted[shard.slices] += shard.is_counted
    assert counted[1:].tolist() == np.ones((2, 24)).tolist()
    assert not counted[0].any()


def test_uneven_parts_differ_by_one_element_at_most() -> None:
    sizes = [Sharding(0, (50257,)).local_size(rank, 4) for rank in range(4)]
    assert sum(sizes) == 50257
    assert max(sizes) - min(sizes) == 1


def test_wrong_blocks_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"blocks \[4\] of axis 0 do not make up \[5, 2\]"):
        Sharding(0, (4,)).shards((5, 2), 0, 2)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        Sharding(0, (4,)).shards((4,), 2, 2)


def test_nothing_is_cut_without_a_shard() -> None:
    whole = np.arange(6)
    assert take_shard(whole, None, 1, 2) is whole


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 11])
def test_rows_of_a_part_are_the_boxes_of_those_rows(axis: int, parts: int) -> None:
    """ZeRO on top of a fused horizontal sharding: every range of rows consists of its shards and of nothing else."""
    whole = np.random.default_rng(0).permutation(200).reshape(10, 20)
    sharding = Sharding(axis, (4, 2, 4) if axis == 0 else (8, 4, 8))
    local = take_shard(whole, sharding, 1, 2)
    shards = sharding.shards(whole.shape, 1, 2)
    rows = -(-local.shape[0] // parts)
    for part in range(parts):
        start, stop = min(part * rows, local.shape[0]), min((part + 1) * rows, local.shape[0])
        expected = local[start:stop]
        found = np.full(expected.shape, -1)
        for shard in cut(shards, start, stop):
            assert (found[shard.local_slices] == -1).all()
            found[shard.local_slices] = whole[shard.slices]
        np.testing.assert_array_equal(found, expected)


def test_no_rows_are_no_boxes() -> None:
    assert cut(Sharding(0, (4,)).shards((4, 3), 0, 2), 2, 2) == ()
    assert cut((), 0, 5) == ()

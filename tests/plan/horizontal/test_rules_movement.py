"""Rules of operators that move elements: a cut seen through them, and what cannot be computed on shards."""

from __future__ import annotations

import numpy as np
import pytest

from onward.plan.horizontal.rules import apply_rule
from onward.plan.horizontal.rules_movement import through_reshape
from onward.plan.shards import Sharding, take_shard
from tests.plan.horizontal.nodes import COLUMNS, Case, X, Y, assert_said, site


@pytest.mark.parametrize(
    ("cut", "before", "after", "expected"),
    [
        (Sharding(2, (12,)), (2, 5, 12), (2, 5, 3, 4), Sharding(2, (3,))),
        (Sharding(2, (4, 4, 4)), (2, 5, 12), (2, 5, 3, 4), Sharding(3, (4,))),
        (Sharding(2, (12,)), (2, 5, 12), (10, 12), Sharding(1, (12,))),
        (Sharding(1, (8,)), (2, 8, 7, 4), (16, 7, 4), Sharding(0, (8, 8))),
        (Sharding(0, (8, 8)), (16, 7, 4), (2, 8, 7, 4), Sharding(1, (8,))),
        (Sharding(1, (6,)), (2, 6, 5, 5), (2, 150), Sharding(1, (150,))),
        (Sharding(3, (6,)), (2, 5, 5, 6), (2, 150), Sharding(1, (6,) * 25)),
        (Sharding(1, (8,)), (2, 8, 4, 4), (2, 4, 32), Sharding(1, (4,))),
        (Sharding(1, (6, 2)), (3, 8), (3, 8, 1), Sharding(1, (6, 2))),
        (Sharding(1, (6, 2)), (3, 8), (3, 2, 4), None),
    ],
)
def test_a_cut_seen_through_a_reshape(
    cut: Sharding, before: tuple[int, ...], after: tuple[int, ...], expected: Sharding | None
) -> None:
    assert through_reshape(cut, before, after) == expected
    if expected is None:
        return
    whole = np.arange(np.prod(before)).reshape(before)
    for rank in range(2):
        if all(block % 2 == 0 for block in (*cut.blocks, *expected.blocks)):
            part = take_shard(whole, cut, rank, 2)
            np.testing.assert_array_equal(take_shard(whole.reshape(after), expected, rank, 2).ravel(), part.ravel())


CASES: dict[str, Case] = {
    "mixed": (
        site("Reshape", {**X, "s": (2,)}, {"y": (8, 4)}, {"s": (8, 4)}), {0: Sharding(1, (6, 2))}, {},
        "mixes the sharded axis 1 with others: [4, 8] to [8, 4]",
    ),
    "joined across": (
        site("Concat", {"a": (4, 3), "b": (4, 5)}, Y, axis=1), {0: Sharding(1, (3,)), 1: Sharding(0, (4,))}, {},
        "its operands are sharded along different axes",
    ),
    "joined over a border": (
        site("Concat", {"a": (4, 3), "b": (4, 5)}, Y, axis=1), {}, {0: Sharding(1, (8,))},
        "a shard of its result crosses an operand's border",
    ),
    "split across": (
        site("Split", X, {"a": (4, 4), "b": (4, 4)}, axis=1, num_outputs=2), {},
        {0: Sharding(1, (4,)), 1: Sharding(0, (4,))},
        "its outputs are sharded along different axes",
    ),
    "split over a border": (
        site("Split", X, {"a": (4, 4), "b": (4, 4)}, axis=1, num_outputs=2), COLUMNS, {},
        "a shard of its operand crosses an output's border",
    ),
    "split unequally": (
        site("Split", X, {"a": (4, 5), "b": (4, 3)}, axis=1, num_outputs=2), {0: Sharding(1, (5, 3))}, {},
        "has outputs of different sizes that it does not list",
    ),
    "every second": (
        site("Slice", {**X, "s": (1,), "e": (1,), "a": (1,), "t": (1,)}, {"y": (4, 4)},
             {"s": (0,), "e": (7,), "a": (1,), "t": (2,)}),
        COLUMNS, {}, "takes one of every 2 elements of the sharded axis, not of each group",
    ),
    "sliced by data": (
        site("Slice", {**X, "s": (1,), "e": (1,), "a": (1,)}, {"y": (4, 5)}, {"a": (1,)}), COLUMNS, {},
        "where it slices depends on data",
    ),
    "sliced over a border": (
        site("Slice", {**X, "s": (1,), "e": (1,), "a": (1,)}, {"y": (4, 5)}, {"s": (0,), "e": (5,), "a": (1,)}),
        COLUMNS, {}, "a shard of its operand crosses the slice's border",
    ),
    "reversed": (
        site("Slice", {**X, "s": (1,), "e": (1,), "a": (1,), "t": (1,)}, Y,
             {"s": (-1,), "e": (-9,), "a": (1,), "t": (-1,)}),
        COLUMNS, {}, "reverses the sharded axis",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("start", "end", "blocks"), [(0, 8, (8,)), (1, 2**63 - 1, (8,)), (1, 9, (4, 4))])
def test_every_second_element_is_of_the_same_groups_on_each_rank(start: int, end: int, blocks: tuple[int, ...]) -> None:
    node = site(
        "Slice", {**X, "s": (1,), "e": (1,), "a": (1,), "t": (1,)}, {"y": (4, 4)},
        {"s": (start,), "e": (end,), "a": (1,), "t": (2,)},
    )  # fmt: skip
    cut, halved = Sharding(1, blocks), Sharding(1, tuple(block // 2 for block in blocks))
    for inputs, outputs in (({0: cut}, {}), ({}, {0: halved})):
        found = apply_rule(node, inputs, outputs)
        assert (found.inputs, found.outputs, found.edits) == ({0: cut}, {0: halved}, ())
        assert [count for count, _ in found.counts] == list(halved.blocks)
    whole = np.arange(32).reshape(4, 8)
    for rank in range(2):
        sliced = take_shard(whole, cut, rank, 2)[:, start:end:2]
        np.testing.assert_array_equal(sliced, take_shard(whole[:, start:end:2], halved, rank, 2))


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_cut_says_why(case: str) -> None:
    assert_said(CASES[case])

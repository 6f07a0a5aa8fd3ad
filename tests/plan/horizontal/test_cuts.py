"""The words of the proof that a cut is sound: axes that go together, units, and blocks that are cut further."""

from __future__ import annotations

import pytest

from onward.plan.horizontal.cuts import (
    AddBiasAfterReduce,
    Assignment,
    CannotShardError,
    Link,
    broadcast_links,
    follow,
    split_at,
    units,
    within,
)
from onward.plan.shards import Sharding
from tests.plan.horizontal.nodes import site


@pytest.mark.parametrize(
    ("blocks", "unit", "count"), [((12,), 4, 3), ((12, 8), 4, 1), ((12, 8), 2, 2), ((12, 7), 4, None), ((), 4, 0)]
)
def test_units_that_all_blocks_are_made_of(blocks: tuple[int, ...], unit: int, count: int | None) -> None:
    assert units(blocks, unit) == count


@pytest.mark.parametrize(
    ("blocks", "borders", "expected"),
    [((8,), (3,), (3, 5)), ((4, 4), (4, 6), (4, 2, 2)), ((8,), (), (8,)), ((8,), (0, 8), (8,)), ((), (), ())],
)
def test_blocks_are_cut_further(blocks: tuple[int, ...], borders: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert split_at(blocks, borders) == expected


def test_a_range_keeps_how_many_ranks_hold_its_blocks() -> None:
    assert within(Sharding(1, (4, 4, 2), (0, 2, 1)), 4, 10) == Sharding(1, (4, 2), (2, 1))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 4, (4,)), (4, 10, (4, 2)), (0, 10, (4, 4, 2)), (2, 8, None), (4, 9, None), (4, 4, ()), (10, 12, ())],
)
def test_blocks_of_a_range(start: int, end: int, expected: tuple[int, ...] | None) -> None:
    assert within(Sharding(1, (4, 4, 2)), start, end) == (None if expected is None else Sharding(1, expected))


SUM = site("Add", {"a": (2, 3, 4), "b": (3, 1), "c": ()}, {"y": (2, 3, 4)})


def test_operands_that_have_an_axis_of_the_result() -> None:
    links = broadcast_links(SUM, [0, 1, 2])
    assert [(dict(link.inputs), dict(link.outputs)) for link in links] == [
        ({0: 0}, {0: 0}), ({0: 1, 1: 0}, {0: 1}), ({0: 2}, {0: 2}),
    ]  # fmt: skip
    assert [dict(link.outputs) for link in broadcast_links(SUM, [0], first_axis=2)] == [{0: 2}]


def test_the_link_that_has_all_known_cuts_is_followed() -> None:
    links = broadcast_links(SUM, [0, 1])
    cut = Sharding(0, (3,))
    assert follow(links, SUM, {1: cut}, {}) == Assignment(
        inputs={0: Sharding(1, (3,)), 1: cut}, outputs={0: Sharding(1, (3,))}
    )
    with pytest.raises(CannotShardError, match=r"needs all of its cut axis at once \(axis 1 of input 1\)"):
        follow(links, SUM, {1: Sharding(1, (1,))}, {})
    with pytest.raises(CannotShardError, match="its operands are sharded into different blocks"):
        follow(links, SUM, {1: cut}, {0: Sharding(1, (2, 1))})


def test_a_bias_is_added_after_partial_sums_where_there_is_one() -> None:
    link = Link({0: 1}, {}, partial=True, bias=(2, 0))
    found = follow([link], SUM, {0: Sharding(1, (3,))}, {})
    assert (found.partial, found.edits) == (True, (AddBiasAfterReduce(2, 0),))
    without = site("Add", {"a": (2, 3), "b": (3,)}, {"y": (2, 3)})
    assert follow([link], without, {0: Sharding(1, (3,))}, {}).edits == ()


def test_what_a_node_says_of_itself() -> None:
    assert [SUM.has_input(index) for index in range(4)] == [True, True, True, False]
    assert SUM.outputs() == [0]
    assert SUM.axis("axis", -1, 3) == 2
    assert site("Add", {"a": (2,), "b": (2,)}, {"y": (2,)}, {"b": 3}).numbers(1) == (3,)
    assert SUM.numbers(7) is None

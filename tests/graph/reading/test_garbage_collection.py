"""Unused objects are not looked for inside of such a function, and are again after it."""

from __future__ import annotations

import gc

import pytest

from onward.graph.reading.garbage_collection import gc_frozen, without_collection


@without_collection
def is_collecting(fails: bool = False) -> bool:
    if fails:
        raise ValueError("as asked")
    return gc.isenabled()


def test_collection_is_held_back_inside_alone() -> None:
    assert gc.isenabled()
    assert not is_collecting()
    assert gc.isenabled()


def test_collection_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="as asked"):
        is_collecting(fails=True)
    assert gc.isenabled()


def test_who_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        assert not is_collecting()
        assert not gc.isenabled()
    finally:
        gc.enable()


def is_settled(held: list[object]) -> bool:
    """Whether the collector leaves it out. How many objects it leaves out says less: some of them end meanwhile."""
    return all(one is not held for one in gc.get_objects())


def test_what_is_there_is_settled_until_the_end() -> None:
    before: list[object] = [object()]
    with gc_frozen():
        later: list[object] = [object()]
        with gc_frozen():
            assert is_settled(before)
            assert not is_settled(later), "the outer one settled on what was there"
        assert is_settled(before), "the inner one has ended, and not the outer one"
    assert not is_settled(before)


def test_settled_objects_are_let_go_after_an_error() -> None:
    held: list[object] = [object()]
    with pytest.raises(ValueError, match="as asked"), gc_frozen():
        is_collecting(fails=True)
    assert not is_settled(held)

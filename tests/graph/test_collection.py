"""Unused objects are not looked for inside of such a function, and are again after it."""

from __future__ import annotations

import gc

import pytest

from onward.graph.collection import settled_objects, without_collection


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


def test_what_is_there_is_settled_until_the_end() -> None:
    with settled_objects():
        settled = gc.get_freeze_count()
        with settled_objects():
            assert gc.get_freeze_count() == settled
        assert gc.get_freeze_count() == settled > 0, "those of the outer one"
    assert gc.get_freeze_count() == 0


def test_settled_objects_are_let_go_after_an_error() -> None:
    with pytest.raises(ValueError, match="as asked"), settled_objects():
        is_collecting(fails=True)
    assert gc.get_freeze_count() == 0

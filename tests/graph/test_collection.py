"""Unused objects are not looked for inside of such a function, and are again after it."""

from __future__ import annotations

import gc

import pytest

from onward.graph.collection import without_collection


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

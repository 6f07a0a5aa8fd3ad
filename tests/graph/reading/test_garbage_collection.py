"""Unused objects are not looked for inside of such a function, and are again after it."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest

from onward.graph.reading.garbage_collection import gc_frozen, importing, without_collection
from tests.conftest import COUNT_FROZEN


@pytest.fixture(autouse=True)
def _nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`conftest.py` freezes what collecting the tests has created, and says so without counting."""
    monkeypatch.setattr(gc, "get_freeze_count", COUNT_FROZEN)
    gc.unfreeze()
    yield
    gc.freeze()


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


def test_what_is_imported_is_never_walked_through() -> None:
    walks: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        walks.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        with importing():
            sys.modules["imported"] = types.ModuleType("imported")
            modules = [[index] for index in range(20_000)]
        assert not walks
        assert any(one is modules for one in gc.get_objects(generation=2)), "the youngest would be walked through next"
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)
        sys.modules.pop("imported", None)


def test_what_somebody_froze_stays_frozen_when_something_is_imported() -> None:
    held: list[object] = [object()]
    with gc_frozen():
        with importing():
            sys.modules["imported"] = types.ModuleType("imported")
            modules: list[object] = [object()]
        del sys.modules["imported"]
        with importing():
            others: list[object] = [object()]
        assert is_settled(held)
        assert not is_settled(others), "nothing was imported: garbage would never be collected"
        assert is_settled(modules), "somebody freezes for good: modules stay as long"


def test_the_process_of_the_command_line_walks_through_no_module_at_its_end() -> None:
    """A third of the CPU time of a short `onward train` went into freeing torch's modules one by one."""
    program = (
        "import atexit, gc, sys; from onward.cli import process; sys.argv = ['onward', 'help', 'train']; "
        "atexit.register(lambda: print('left to walk:', len(gc.get_objects()))); process()"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "usage: onward train" in said
    assert int(said.rsplit("left to walk:", 1)[1]) < 1000

"""The file of a lock: made by one only, taken away only by its holder, also where hard links are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from onward.exclusive.lock_file import LocalLockFile, lock_file


@pytest.fixture(params=["local", "without links"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLockFile:
    if request.param == "without links":

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(1, "no links here")

        monkeypatch.setattr(os, "link", refuse)
    return LocalLockFile(tmp_path / "deep" / "lock")


def test_one_of_two_makes_it(file: LocalLockFile) -> None:
    assert (file.read(), file.sign_of_life(), file.age_seconds()) == (None, None, None)
    assert file.create("first")
    assert not file.create("second")
    assert file.read() == "first"
    assert str(file) == str(file.path)
    assert [one.name for one in file.path.parent.iterdir()] == ["lock"]  # no drafts are left


def test_refreshing_is_a_sign_of_life(file: LocalLockFile) -> None:
    file.create("mine")
    os.utime(file.path, (1e9, 1e9))
    before = file.sign_of_life()
    assert (file.age_seconds() or 0) > 1e6
    file.refresh("mine")
    assert file.sign_of_life() != before
    assert abs(file.age_seconds() or 0) < 60


def test_folders_made_for_a_lock_are_removed_if_they_stay_empty(tmp_path: Path) -> None:
    for kept in (True, False):
        file = lock_file(tmp_path / "new" / "inner" / "lock")
        assert file.create("mine")
        if kept:
            (tmp_path / "new" / "written").touch()
        file.take_away("mine")
        assert [path.name for path in tmp_path.rglob("*")] == (["new", "written"] if kept else [])
        (tmp_path / "new" / "written").unlink(missing_ok=True)
        if kept:
            (tmp_path / "new").rmdir()


def test_a_lock_of_another_stays(tmp_path: Path) -> None:
    file = lock_file(tmp_path / "lock")
    file.take_away("mine")  # there is none
    assert file.create("theirs")
    file.take_away("mine")
    assert file.read() == "theirs"
    file.take_away("theirs")
    assert file.read() is None

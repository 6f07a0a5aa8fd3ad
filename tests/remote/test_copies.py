"""Local copies of remote files: one place for each URL, and what is local stays where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.remote.copies import (
    CACHE_VARIABLE,
    cache_folder,
    local_folder,
    local_model,
    place_of,
    uploaded,
)


def test_the_folder_for_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "onward"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "onward"


def test_files_of_one_folder_are_copied_next_to_each_other() -> None:
    a, b, c = (place_of(Path(one)) for one in ("s3:/bucket/x/a", "s3:/bucket/x/b", "s3:/bucket/y/a"))
    assert a.parent == b.parent != c.parent
    assert (a.name, c.name) == ("a", "a")


def test_what_is_local_stays(tmp_path: Path) -> None:
    assert local_model(tmp_path / "none.onnx") == tmp_path / "none.onnx"
    assert local_folder(tmp_path) == tmp_path
    with uploaded(tmp_path / "out") as written:
        assert written == tmp_path / "out"

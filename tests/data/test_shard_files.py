"""Which shards a directory holds, which of them a rank reads, and which are damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onward.data.shard_files import find_shard_files, list_shards
from onward.errors import DataError, ParametersError


def folder_of(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x" * len(name))
    return path


def test_shards_only_in_order_of_name(tmp_path: Path) -> None:
    folder_of(tmp_path, "b.pb", "a.pb", ".hidden.pb", "note.txt", "c.pb.partial", "deep/d.pb")
    (tmp_path / "folder.pb").mkdir()
    assert {path.name: size for path, size in list_shards(tmp_path).items()} == {"a.pb": 4, "b.pb": 4}
    assert [path.name for path in list_shards(tmp_path)] == ["a.pb", "b.pb"]


def test_ranks_share_the_files(tmp_path: Path) -> None:
    folder_of(tmp_path, *(f"{number}.pb" for number in range(5)))
    parts = [find_shard_files(tmp_path, rank, 2) for rank in range(2)]
    assert [one.numbers for one in parts] == [(0, 2, 4), (1, 3)]
    assert [path.name for path in parts[1].paths] == ["1.pb", "3.pb"]
    assert {one.total for one in parts} == {5}
    assert parts[0].fingerprint != parts[1].fingerprint
    assert find_shard_files(tmp_path, 0, 2).fingerprint == parts[0].fingerprint
    (tmp_path / "4.pb").write_bytes(b"longer than before")
    assert find_shard_files(tmp_path, 0, 2).fingerprint != parts[0].fingerprint


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (True, 2), (0, 1.0)])
def test_ranks_that_make_no_sense(rank: Any, size: Any, tmp_path: Path) -> None:
    with pytest.raises(ParametersError, match="expected integers with 0 <= rank < size"):
        find_shard_files(tmp_path, rank, size)


def test_folders_without_shards(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none' does not exist; give a directory with \.pb shards"):
        list_shards(tmp_path / "none")
    with pytest.raises(DataError, match=r"a\.pb' is a file; give the directory that holds it"):
        list_shards(folder_of(tmp_path / "one", "a.pb") / "a.pb")
    with pytest.raises(DataError, match=r"holds no \.pb files, but its folders 'one' do: give one of those"):
        find_shard_files(tmp_path, 0, 1)
    with pytest.raises(DataError, match=r"holds 1 \.pb files for 2 data-parallel ranks; every rank reads its own"):
        find_shard_files(tmp_path / "one", 0, 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="write shards there with onward pack, or give another directory"):
        find_shard_files(tmp_path / "empty", 0, 1)

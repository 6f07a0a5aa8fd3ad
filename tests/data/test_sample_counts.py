"""How many samples replicas read in an epoch."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.data.loader import DataLoader
from onward.data.sample_counts import samples_of_replicas
from onward.errors import DataError
from tests.mlp import data, write_shards


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_as_many_as_their_loaders_read(tmp_path: Path, replicas: int) -> None:
    folder = write_shards(tmp_path / "train", data(23), files=5)
    loaders = [DataLoader({}, folder, 1, rank, replicas) for rank in range(replicas)]
    read = [sum(batch.sample_count for batch in loader.one_pass(4)) for loader in loaders]
    assert list(samples_of_replicas(folder, replicas)) == read
    assert sum(read) == 23


def test_broken_files_count_nothing_where_they_are_skipped(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "train", data(8), files=2)
    (folder / "1.pb").write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match=r"1\.pb"):
        samples_of_replicas(folder, 1)
    assert samples_of_replicas(folder, 1, skip_corrupt=True) == (4,)
    with pytest.raises(DataError, match=r"^no shard of replica 1 in .* can be read; pack the data again\.$"):
        samples_of_replicas(folder, 2, skip_corrupt=True)

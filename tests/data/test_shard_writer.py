"""Shards that are written: complete or not at all."""

import errno
import os

import numpy as np
import pytest

from onward.data.shard_format import encode_sample, write_sample
from onward.data.shard_writer import ShardWriter
from onward.errors import DataError, StorageError
from tests.data.shards import SAMPLES, write


def test_the_file_appears_only_when_it_is_complete(tmp_path):
    with ShardWriter(tmp_path / "a.pb") as writer:
        writer.write(SAMPLES[0])
        assert not list(tmp_path.glob("*.pb"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.pb"]
    assert (writer.sample_count, writer.byte_count) == (1, (tmp_path / "a.pb").stat().st_size)


def test_an_exception_leaves_nothing_and_the_former_file_as_it_was(tmp_path):
    before = write(tmp_path / "a.pb").read_bytes()
    with pytest.raises(DataError, match="a shard holds numbers"):
        write(tmp_path / "a.pb", [SAMPLES[0], {"x": np.array("words")}])
    assert [path.name for path in tmp_path.iterdir()] == ["a.pb"]
    assert (tmp_path / "a.pb").read_bytes() == before


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match=r"a\.pb' after 4 samples \(\d+ bytes\): No space left on device"):
        write(tmp_path / "a.pb")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write shard .*No such file"):
        ShardWriter(tmp_path / "missing" / "a.pb")


def test_what_a_shard_cannot_hold_is_refused(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        with pytest.raises(DataError, match="feature 'x' has dtype <U1; a shard holds numbers"):
            write_sample(file, {"x": np.array("a")})
        with pytest.raises(DataError, match="at least one feature"):
            write_sample(file, {})


def test_a_feature_of_more_than_2_gib_is_refused():
    huge = np.broadcast_to(np.float32(0), (1 << 29,))
    with pytest.raises(DataError, match="feature 'x' has 2147483648 bytes in one sample; at most 2 GiB fit"):
        encode_sample({"x": huge})

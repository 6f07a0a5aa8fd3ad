"""Samples read from their file when a batch takes them give what an entire file in memory gives."""

import errno
import itertools
import os
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import ml_dtypes
import numpy as np
import pytest

from onward.data import loader as loaders
from onward.data import stored_rows
from onward.data.loader import DataLoader
from onward.data.manifest import MANIFEST_NAME
from onward.data.shard import Shard, load_shard
from onward.data.shard_writer import ShardWriter
from onward.data.stored_rows import LoadedRows, StoredRows, open_rows
from onward.errors import DataError

SIZE = 10_000
"""Elements of a sample's largest feature: 40,000 bytes."""


def write(folder, counts, extra=()):
    """Shards of large samples of several features; `extra`: a sample of another layout at the end of the last."""
    number = 0
    folder.mkdir(exist_ok=True)
    for file, count in enumerate(counts):
        with ShardWriter(folder / f"part-{file}.pb") as writer:
            for _ in range(count):
                pixels = np.random.default_rng(number).random(SIZE, np.float32).reshape(100, 100)
                features = {"id": np.array(number), "pixels": pixels, "note": np.full(3, number, np.uint8)}
                half = pixels[0].astype(ml_dtypes.bfloat16)
                writer.write({**features, "half": half, "none": np.zeros((0, 4), np.int32)})
                number += 1
            if extra and file == len(counts) - 1:
                writer.write(dict.fromkeys(extra, np.zeros(3)))
    return folder


def take(loader, batch_size, count, **cursor):
    with closing(loader.batches(batch_size, **cursor)) as batches:
        return list(itertools.islice(batches, count))


def equal(found, expected):
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.cursor == other.cursor
        assert set(one.features) == set(other.features)
        for name, array in one.features.items():
            assert array.dtype == other.features[name].dtype
            assert array.shape == other.features[name].shape
            assert array.tobytes() == other.features[name].tobytes()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("names", [{}, {"note": ""}, {"pixels": "image", "id": ""}])
@pytest.mark.parametrize("threads", [1, 2])
def test_batches_are_those_of_files_in_memory(tmp_path, monkeypatch, shuffle, names, threads):
    write(tmp_path, [5, 4, 3])
    opened, readers, read = [], set(), StoredRows._read_sample
    monkeypatch.setattr(loaders, "usable_cores", lambda: threads)
    monkeypatch.setattr(stored_rows, "_WORTH_TWO_THREADS_BYTES", 0)
    monkeypatch.setattr(
        StoredRows, "_read_sample", lambda *to: (readers.add(threading.current_thread().name), read(*to))
    )
    monkeypatch.setattr(StoredRows, "read_ahead", lambda rows: opened.append(rows))
    with DataLoader(names, tmp_path, 2, shuffle=shuffle) as loader:
        found = take(loader, 5, 6)
        resumed = take(loader, 5, 4, cursor=found[1].cursor)
        assert opened, "no file was read sample by sample"
        assert any(name.startswith("onward-read") for name in readers) == (threads == 2)
    equal(resumed, found[2:])
    monkeypatch.setattr(loaders, "open_rows", lambda *_, **__: None)
    with DataLoader(names, tmp_path, 2, shuffle=shuffle) as loader:
        equal(found, take(loader, 5, 6))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("names", [{}, {"note": ""}, {"pixels": "image", "id": ""}])
@pytest.mark.parametrize("gathered", [1, 100_000])
def test_features_of_small_samples_are_cut_out_of_those_of_a_batch(tmp_path, monkeypatch, shuffle, names, gathered):
    write(tmp_path, [5, 4, 3])
    monkeypatch.setattr(stored_rows, "_LARGE_SAMPLE_BYTES", 1 << 30)
    monkeypatch.setattr(stored_rows, "_GATHERED_BYTES", gathered)
    read = []
    monkeypatch.setattr(LoadedRows, "read", lambda rows, *to, own=LoadedRows.read: (read.append(rows), own(rows, *to)))
    with DataLoader(names, tmp_path, 2, shuffle=shuffle) as loader:
        found = take(loader, 5, 6)
        equal(take(loader, 5, 4, cursor=found[1].cursor), found[2:])
    assert read, "every file was taken apart before"
    monkeypatch.setattr(loaders, "open_rows", lambda *_, **__: None)
    with DataLoader(names, tmp_path, 2, shuffle=shuffle) as loader:
        equal(found, take(loader, 5, 6))


def test_nothing_as_large_as_a_file_is_in_memory(tmp_path):
    write(tmp_path, [60, 60, 60])
    with DataLoader({}, tmp_path, 2, shuffle=True) as loader:
        batches = loader.batches(2)
        next(batches)
        for _ in itertools.islice(batches, 95):
            pass
        tracemalloc.start()
        for _ in itertools.islice(batches, 95):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1e6 < 60 * 4 * SIZE


def test_small_samples_are_compared_with_the_checksum_and_the_layout_of_the_first(tmp_path):
    path = tmp_path / "small.pb"
    with ShardWriter(path) as writer:
        for number in range(3):
            writer.write({"x": np.full(10, number)})
    assert isinstance(open_rows(path, {}, writer.checksum, is_verified=False), LoadedRows)
    with pytest.raises(DataError, match="is corrupt: its bytes have the checksum"):
        open_rows(path, {}, "xxh3-64:0123456789abcdef", is_verified=False)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 3 + 4)
        file.write(b"\xff")
    assert open_rows(path, {}, None, is_verified=True) is None


def test_other_layouts_are_read_as_before(tmp_path):
    (tmp_path / "empty.pb").touch()
    assert open_rows(tmp_path / "empty.pb", {}, None, is_verified=False) is None
    path = write(tmp_path / "uneven", [2], extra=("id",)) / "part-0.pb"
    assert open_rows(path, {}, None, is_verified=False) is None
    with ShardWriter(tmp_path / "order.pb") as writer:  # equal sizes, another order of the features
        writer.write({"a": np.zeros(SIZE), "b": np.zeros(SIZE)})
        writer.write({"b": np.ones(SIZE), "a": np.zeros(SIZE)})
    assert open_rows(tmp_path / "order.pb", {}, None, is_verified=False) is None
    np.testing.assert_array_equal(load_shard(tmp_path / "order.pb", {}).features["b"][1], np.ones(SIZE))


def test_files_of_samples_in_two_layouts_are_read_in_every_epoch(tmp_path):
    for file in range(3):
        with ShardWriter(tmp_path / f"part-{file}.pb") as writer:
            writer.write({"a": np.full(SIZE, file), "b": np.full(SIZE, -file)})
            writer.write({"b": np.full(SIZE, -file), "a": np.full(SIZE, file)})
    with DataLoader({}, tmp_path, 2) as loader:
        batches = take(loader, 2, 6)
    assert [batch.features["a"][:, 0].tolist() for batch in batches] == [[0, 0], [1, 1], [2, 2]] * 2


def test_a_missing_file_and_a_wrong_checksum_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read: No such file"):
        open_rows(tmp_path / "gone.pb", {}, None, is_verified=True)
    path = write(tmp_path, [3]) / "part-0.pb"
    with pytest.raises(DataError, match=rf"is corrupt: its bytes have the checksum .*, but {MANIFEST_NAME} says"):
        open_rows(path, {}, "xxh3-64:0123456789abcdef", is_verified=False)
    with ShardWriter(tmp_path / "again.pb") as writer:
        writer.write({"x": np.zeros(SIZE)})
    rows = open_rows(tmp_path / "again.pb", {}, writer.checksum, is_verified=False)
    assert rows is not None
    assert rows.sample_count == 1


def test_what_the_other_thread_cannot_read_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_rows, "_WORTH_TWO_THREADS_BYTES", 0)
    path = write(tmp_path, [4]) / "part-0.pb"
    with ThreadPoolExecutor(1) as helper:
        rows = open_rows(path, {}, None, is_verified=False, helper=helper)
        out = {name: np.empty((4, *spec.shape), spec.dtype) for name, spec in rows.specs.items()}
        os.truncate(path, 3 * path.stat().st_size // 4)
        with pytest.raises(DataError, match=r"ended at byte .*something shortened it meanwhile"):
            rows.read(np.array([0, 1, 2, 3]), out)


def test_a_file_cut_off_or_rewritten_meanwhile_is_an_error(tmp_path):
    path = write(tmp_path, [3]) / "part-0.pb"
    rows = open_rows(path, {}, None, is_verified=False)
    out = {name: np.empty((1, *spec.shape), spec.dtype) for name, spec in rows.specs.items()}
    size = path.stat().st_size // 3
    with open(path, "r+b") as file:
        file.seek(size + 4)
        file.write(b"\xff")
    rows.read(np.array([0]), out)
    with pytest.raises(DataError, match=r"sample 1.*another layout than the first of its file.*Do not write to shards"):
        rows.read(np.array([1]), out)
    os.truncate(path, 2 * size + 100)
    with pytest.raises(DataError, match=r"ended at byte .*something shortened it meanwhile"):
        rows.read(np.array([2]), out)


def test_a_passing_failure_and_half_a_sample_are_read_again(tmp_path, monkeypatch):
    path = write(tmp_path, [2]) / "part-0.pb"
    rows, shard = open_rows(path, {}, None, is_verified=False), load_shard(path, {})
    out = {name: np.empty((1, *spec.shape), spec.dtype) for name, spec in rows.specs.items()}
    read = os.preadv

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    for broken in (fail, lambda descriptor, buffers, offset: read(descriptor, buffers[:2], offset)):
        monkeypatch.setattr(os, "preadv", broken)
        for array in out.values():
            array.fill(0)
        rows.read(np.array([1]), out)
        for name, array in out.items():
            assert array[0].tobytes() == shard.features[name][1].tobytes()


def test_a_file_that_cannot_be_read_any_more_is_named(tmp_path, monkeypatch):
    path = write(tmp_path, [2]) / "part-0.pb"
    rows = open_rows(path, {}, None, is_verified=False)
    out = {name: np.empty((1, *spec.shape), spec.dtype) for name, spec in rows.specs.items()}

    def fail(*_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(stored_rows, "read_exactly", fail)
    with pytest.raises(DataError, match=r"part-0.pb' cannot be read: Permission denied"):
        rows.read(np.array([1]), out)


def test_files_that_fit_stay_in_memory(tmp_path, monkeypatch):
    write(tmp_path, [2, 2])
    loader = DataLoader({}, tmp_path, 2)
    take(loader, 2, 4)
    assert all(isinstance(shard, Shard) for shard in loader._resident.values())
    assert len(loader._resident) == 2
    loader.close()

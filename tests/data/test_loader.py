import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.data import prefetch
from onward.data.batches import START, DataCursor
from onward.data.loader import DataLoader
from onward.data.shard import FeatureSpec, Shard
from onward.data.shard_writer import ShardWriter
from onward.errors import DataError, OnwardError, ParametersError

LISTS = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@pytest.fixture(autouse=True, params=["inline", "ahead"])
def small_batches(request, monkeypatch):
    """Small batches are put together when they are asked for, large ones ahead: what holds for one holds for both."""
    monkeypatch.setattr(prefetch, "WORTH_A_THREAD_BYTES", 1 << 20 if request.param == "inline" else 0)
    return request.param == "inline"


def write(folder, counts, first=0):
    """Shards of `counts` samples; sample k of all holds id k and a vector made from it."""
    number = first
    folder.mkdir(exist_ok=True)
    for file, count in enumerate(counts):
        with ShardWriter(folder / f"part-{file:03d}.pb") as writer:
            for _ in range(count):
                writer.write({"id": np.array(number), "x": np.arange(3, dtype=np.float32) + number})
                number += 1
    return folder


def ids(batches):
    return [batch.features["id"].tolist() for batch in batches]


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def take(loader, batch_size, count, cursor=START):
    with closing(loader.batches(batch_size, cursor)) as batches:
        return list(itertools.islice(batches, count))


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


# ------------------------------------------------------------------------------------------------------------ order


def test_files_are_read_in_order_of_name_hidden_ones_folders_and_others_not(tmp_path):
    write(tmp_path, [2, 3])
    write(tmp_path / "deeper", [1], first=100)
    write(tmp_path / "folder.pb", [1], first=100)
    for name in (".hidden.pb", "notes.txt", "part-000.pb.tmp", ".part-009.pb.123.partial"):
        (tmp_path / name).write_bytes(b"rubbish")
    loader = DataLoader({}, tmp_path)
    assert [path.name for path in loader.files] == ["part-000.pb", "part-001.pb"]
    assert ids(loader.one_pass(2)) == [[0, 1], [2, 3], [4]]
    assert loader.sample_count == 5
    assert loader.feature_specs() == {
        "id": FeatureSpec((), np.dtype(np.int64)),
        "x": FeatureSpec((3,), np.dtype(np.float32)),
    }


def test_batches_run_over_file_ends_and_hold_the_files_values(tmp_path):
    batches = take(DataLoader({"x": "input", "id": ""}, write(tmp_path, [3, 1, 4])), 5, 2)
    assert [batch.sample_count for batch in batches] == [5, 5]
    expected = np.arange(10)[:, None] % 8 + np.arange(3)
    np.testing.assert_array_equal(np.concatenate([batch.features["input"] for batch in batches]), expected)
    assert all(batch.features["input"].dtype == np.float32 and set(batch.features) == {"input"} for batch in batches)


def test_wrap_completes_the_last_batch_from_the_next_epoch(tmp_path):
    batches = take(DataLoader({}, write(tmp_path, [2, 3])), 3, 5)
    assert ids(batches) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1], [2, 3, 4]]
    assert [batch.epoch for batch in batches] == [0, 0, 1, 1, 2]
    assert [(batch.cursor.epoch, batch.cursor.sample) for batch in batches] == [(0, 3), (1, 1), (1, 4), (2, 2), (3, 0)]


def test_wrap_serves_batches_larger_than_an_epoch(tmp_path):
    assert ids(take(DataLoader({}, write(tmp_path, [2, 1])), 7, 2)) == [[0, 1, 2, 0, 1, 2, 0], [1, 2, 0, 1, 2, 0, 1]]


def test_drop_leaves_out_an_epochs_incomplete_batch_and_counts_it(tmp_path):
    loader = DataLoader({}, write(tmp_path, [2, 3]), last_batch="drop")
    assert ids(take(loader, 2, 5)) == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]
    assert loader.dropped_samples == 2


def test_drop_refuses_a_batch_larger_than_an_epoch(tmp_path):
    loader = DataLoader({}, write(tmp_path, [2, 3]), last_batch="drop")
    assert ids(take(loader, 5, 2)) == [[0, 1, 2, 3, 4]] * 2
    with pytest.raises(DataError, match="an epoch has only 5 samples, fewer than batch_size 6"):
        take(loader, 6, 1)


def test_short_makes_a_smaller_batch(tmp_path):
    batches = take(DataLoader({}, write(tmp_path, [2, 3]), last_batch="short"), 3, 4)
    assert ids(batches) == [[0, 1, 2], [3, 4], [0, 1, 2], [3, 4]]
    assert [batch.epoch for batch in batches] == [0, 0, 1, 1]
    assert batches[1].features["x"].shape == (2, 3)
    assert batches[1].cursor.epoch == 1


def test_shuffling_depends_on_seed_and_epoch_and_spares_evaluation(tmp_path):
    write(tmp_path, [5, 5, 5])
    loader = DataLoader({}, tmp_path, shuffle=True, seed=7)
    first, second = (flat(ids(take(loader, 15, 2)[k : k + 1])) for k in (0, 1))
    assert sorted(first) == sorted(second) == list(range(15))
    assert first != second
    assert first != list(range(15))
    assert flat(ids(take(DataLoader({}, tmp_path, shuffle=True, seed=7), 15, 1))) == first
    assert flat(ids(take(DataLoader({}, tmp_path, shuffle=True, seed=8), 15, 1))) != first
    assert flat(ids(loader.one_pass(4))) == list(range(15))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=LISTS, batch_size=st.integers(1, 9), shuffle=st.booleans(), preload=st.integers(1, 4), seed=st.integers(0, 9)
)
def test_every_epoch_reads_every_sample_exactly_once(tmp_path_factory, counts, batch_size, shuffle, preload, seed):
    folder = write(tmp_path_factory.mktemp("data"), counts)
    total = sum(counts)
    for last_batch in ("wrap", "short"):
        loader = DataLoader({}, folder, preload, shuffle=shuffle, seed=seed, last_batch=last_batch)
        with closing(loader.batches(batch_size)) as batches:
            read = []
            while len(read) < 3 * total:
                batch = next(batches)
                assert last_batch == "short" or batch.sample_count == batch_size
                assert all(len(array) == batch.sample_count for array in batch.features.values())
                np.testing.assert_array_equal(batch.features["x"][:, 0], batch.features["id"])
                read += batch.features["id"].tolist()
        for epoch in range(3):
            assert sorted(read[epoch * total : (epoch + 1) * total]) == list(range(total))
        assert flat(ids(loader.one_pass(batch_size))) == list(range(total))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), counts=LISTS, batch_size=st.integers(1, 9), shuffle=st.booleans(), preload=st.integers(1, 3))
def test_resuming_from_any_cursor_equals_never_stopping(tmp_path_factory, data, counts, batch_size, shuffle, preload):
    folder = write(tmp_path_factory.mktemp("data"), counts)
    last_batch = data.draw(st.sampled_from(["wrap", "short", *(["drop"] if batch_size <= sum(counts) else [])]))
    options = {"shuffle": shuffle, "seed": 3, "last_batch": last_batch}
    whole = take(DataLoader({}, folder, 2, **options), batch_size, 12)
    stop = data.draw(st.integers(0, 11))
    cursor = whole[stop].cursor
    assert DataCursor.from_dict(cursor.to_dict()) == cursor
    if data.draw(st.booleans()):
        cursor = DataCursor(epoch=cursor.epoch, sample=cursor.sample)  # the file is then found through the index
    rest = take(DataLoader({}, folder, preload, **options), batch_size, 11 - stop, cursor)
    for expected, found in zip(whole[stop + 1 :], rest, strict=True):
        assert found.cursor == expected.cursor
        assert (found.epoch, found.sample_count) == (expected.epoch, expected.sample_count)
        for name, array in expected.features.items():
            assert array.tobytes() == found.features[name].tobytes()


def names_of_loaded(monkeypatch):
    """A list to which every file that is loaded from now on adds its name."""
    opened, load = [], DataLoader._load
    monkeypatch.setattr(
        DataLoader, "_load", lambda own, file, *to: opened.append(own.files[file].name) or load(own, file, *to)
    )
    return opened


def test_resuming_reads_no_file_before_the_cursor(tmp_path, monkeypatch):
    write(tmp_path, [4] * 6)
    opened = names_of_loaded(monkeypatch)
    batch = take(DataLoader({}, tmp_path, 1), 2, 9)[-1]
    opened.clear()
    assert ids(take(DataLoader({}, tmp_path, 1), 2, 1, batch.cursor)) == [[18, 19]]
    assert opened[0] == "part-004.pb"
    assert set(opened) <= {"part-004.pb", "part-005.pb"}


def test_a_cursor_outside_of_the_data_is_refused(tmp_path):
    loader = DataLoader({}, write(tmp_path, [2, 3]))
    with pytest.raises(DataError, match=r"sample 9 of epoch 1, but an epoch of .* has 5 samples for this rank"):
        loader.batches(1, DataCursor(epoch=1, sample=9))
    with pytest.raises(DataError, match=r"in file 2 \(from 0\) of epoch 0, but this rank has 2 files"):
        loader.batches(1, DataCursor(epoch=0, sample=5, file=2, file_sample=0))
    with pytest.raises(DataError, match=r"sample 7 of .*part-000\.pb', which has 2 samples"):
        next(loader.batches(1, DataCursor(epoch=0, sample=7, file=0, file_sample=7)))


def test_data_that_changed_since_the_cursor_are_mentioned(tmp_path):
    cursor = take(DataLoader({}, write(tmp_path, [2, 3])), 2, 1)[0].cursor
    same = DataLoader({}, tmp_path)
    take(same, 2, 1, cursor)
    assert same.messages == []
    shuffled = DataLoader({}, tmp_path, shuffle=True)
    take(shuffled, 2, 1, cursor)
    assert len(shuffled.messages) == 1
    assert "differ from those of the checkpoint" in shuffled.messages[0]


# -------------------------------------------------------------------------------------------------------- partition


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=LISTS, size=st.integers(1, 5))
def test_the_ranks_files_are_disjoint_and_cover_all(tmp_path_factory, counts, size):
    folder = write(tmp_path_factory.mktemp("data"), counts)
    if len(counts) < size:
        with pytest.raises(DataError, match=f"holds {len(counts)} .pb files for {size} data-parallel ranks"):
            DataLoader({}, folder, rank=size - 1, size=size)
        return
    loaders = [DataLoader({}, folder, rank=rank, size=size) for rank in range(size)]
    names = [f"part-{file:03d}.pb" for file in range(len(counts))]
    assert [[path.name for path in loader.files] for loader in loaders] == [names[rank::size] for rank in range(size)]
    read = [number for loader in loaders for number in flat(ids(loader.one_pass(2)))]
    assert sorted(read) == list(range(sum(counts)))
    assert all(
        ("one more than the other" in " ".join(loader.messages)) == bool(len(counts) % size) for loader in loaders
    )


@pytest.mark.parametrize(
    ("files", "size", "words"),
    [
        (9, 2, "rank 0 reads one more than the other, whose epochs are shorter."),
        (5, 3, "ranks 0 to 1 read one more than the other, whose epochs are shorter."),
        (4, 3, "rank 0 reads one more than the others, whose epochs are shorter."),
        (6, 4, "ranks 0 to 1 read one more than the others, whose epochs are shorter."),
    ],
)
def test_ranks_that_read_more_are_named(tmp_path, files, size, words):
    (message,) = DataLoader({}, write(tmp_path, [1] * files), size=size).messages
    assert message == f"{files} shards over {size} data-parallel ranks: {words}"


def test_bad_arguments_are_refused(tmp_path):
    write(tmp_path / "data", [2])
    with pytest.raises(DataError, match="nowhere' does not exist"):
        DataLoader({}, tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a file; give the directory"):
        DataLoader({}, tmp_path / "data" / "part-000.pb")
    with pytest.raises(DataError, match="nnn' cannot be listed: File name too long"):
        DataLoader({}, tmp_path / ("n" * 300))
    with pytest.raises(DataError, match=r"holds no \.pb files, but its folders 'data' do"):
        DataLoader({}, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no \.pb files; write shards there with onward pack"):
        DataLoader({}, tmp_path / "empty")
    with pytest.raises(ParametersError, match="max_num_files_preload is 0; expected an integer of at least 1"):
        DataLoader({}, tmp_path / "data", 0)
    with pytest.raises(ParametersError, match="last_batch is 'pad'; expected one of wrap, drop, short"):
        DataLoader({}, tmp_path / "data", last_batch="pad")
    with pytest.raises(ParametersError, match="rank 1 of 1: expected integers with 0 <= rank < size"):
        DataLoader({}, tmp_path / "data", rank=1)
    with pytest.raises(ParametersError, match="seed of the data's order is -1"):
        DataLoader({}, tmp_path / "data", seed=-1)
    with pytest.raises(ParametersError, match="input 'x' two features, 'a' and 'b'"):
        DataLoader({"a": "x", "b": "x"}, tmp_path / "data")
    DataLoader({"a": "", "b": "", "x": "input"}, tmp_path / "data")
    with pytest.raises(ParametersError, match="batch_size is 0; expected an integer of at least 1"):
        DataLoader({}, tmp_path / "data").batches(0)


# ----------------------------------------------------------------------------------------------------- broken files


def break_file(path):
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize("preload", [1, 2, 5])
def test_a_broken_file_raises_in_the_consumer_after_the_samples_before_it(tmp_path, preload):
    write(tmp_path, [2, 2, 2])
    break_file(tmp_path / "part-001.pb")
    batches = DataLoader({}, tmp_path, preload).batches(1)
    assert ids([next(batches), next(batches)]) == [[0], [1]]
    with pytest.raises(DataError, match=r"part-001\.pb', sample 1, byte \d+: its length field says"):
        next(batches)


def test_broken_files_are_skipped_and_counted_when_asked(tmp_path):
    write(tmp_path, [2, 2, 2])
    for name in ("part-000.pb", "part-002.pb"):
        break_file(tmp_path / name)
    loader = DataLoader({}, tmp_path, 1, skip_corrupt=True)
    batches = take(loader, 1, 5)
    assert ids(batches) == [[2], [3], [2], [3], [2]]
    assert sorted(path.name for path in loader.skipped_files) == ["part-000.pb", "part-002.pb"]
    assert len(loader.messages) == 2
    assert "skipped, 1 of 3 files so far: shard" in loader.messages[0]
    assert loader.sample_count == 2
    assert set(loader.feature_specs()) == {"id", "x"}
    resumed = DataLoader({}, tmp_path, 2, skip_corrupt=True)
    assert ids(take(resumed, 1, 3, batches[1].cursor)) == [[2], [3], [2]]


def test_all_files_broken_is_an_error(tmp_path):
    write(tmp_path, [2, 2])
    for path in tmp_path.iterdir():
        break_file(path)
    loader = DataLoader({}, tmp_path, skip_corrupt=True)
    with pytest.raises(DataError, match=r"all 2 shards of this rank in .* are broken, .* The first, 'part-000\.pb'"):
        next(loader.batches(1))
    with pytest.raises(DataError, match="all 2 shards"):
        loader.feature_specs()
    with pytest.raises(DataError, match="all 2 shards"):
        next(DataLoader({}, tmp_path, skip_corrupt=True).one_pass(1))


def test_files_that_do_not_match_are_named(tmp_path):
    write(tmp_path, [2])
    with ShardWriter(tmp_path / "part-001.pb") as writer:
        writer.write({"id": np.array(2), "x": np.zeros(4, np.float32)})
    with pytest.raises(DataError, match=r"part-001\.pb': feature 'x' is float32\[4\], but float32\[3\] in .*part-000"):
        list(DataLoader({}, tmp_path).one_pass(2))


# ---------------------------------------------------------------------------------------------------------- prefetch


@pytest.mark.parametrize("preload", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_no_more_files_than_asked_are_in_memory(tmp_path, monkeypatch, preload, batch_size):
    """Shards are counted from before they are loaded until they are freed."""
    write(tmp_path, [3] * 8)
    alive, most, lock = 0, 0, threading.Lock()
    load = DataLoader._load

    def freed():
        nonlocal alive
        with lock:
            alive -= 1

    def counting(own, file, helper):
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        shard = load(own, file, helper)
        weakref.finalize(shard.features["id"] if isinstance(shard, Shard) else shard, freed)
        return shard

    monkeypatch.setattr(DataLoader, "_load", counting)
    loader = DataLoader({}, tmp_path, preload)
    for _ in itertools.islice(loader.batches(batch_size), 60):
        time.sleep(0.0005)
    assert 1 <= most <= preload


def test_files_are_read_ahead_while_the_consumer_works(tmp_path, monkeypatch):
    write(tmp_path, [10] * 6)
    opened = names_of_loaded(monkeypatch)
    batches = DataLoader({}, tmp_path, 3).batches(1)
    next(batches)
    assert wait_until(lambda: len(opened) == 3)
    time.sleep(0.02)
    assert len(opened) == 3


def test_files_that_all_fit_are_read_once(tmp_path, monkeypatch):
    write(tmp_path, [2, 2])
    opened = names_of_loaded(monkeypatch)
    loader = DataLoader({}, tmp_path, 2)
    take(loader, 3, 10)
    list(loader.one_pass(1))
    assert opened == ["part-000.pb", "part-001.pb"]


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "onward-prefetch"]


def test_threads_end_when_the_consumer_stops_closes_or_forgets(tmp_path, small_batches):
    write(tmp_path, [2] * 6)
    gc.collect()
    assert wait_until(lambda: not prefetch_threads())
    loader = DataLoader({}, tmp_path, 2)
    batches = loader.batches(1)
    next(batches)
    assert len(prefetch_threads()) == (1 if small_batches else 2)
    batches.close()
    assert wait_until(lambda: not prefetch_threads())
    batches = loader.batches(1)
    next(batches)
    del batches
    assert wait_until(lambda: not prefetch_threads())
    batches = loader.batches(1)
    next(batches)
    loader.close()
    assert not prefetch_threads()
    with pytest.raises(OnwardError, match="closed while its batches were still being read"):
        list(itertools.islice(batches, 10))


def test_the_interpreter_exits_with_a_loader_left_open(tmp_path):
    write(tmp_path, [2] * 6)
    code = (
        f"from onward.data import DataLoader; b = DataLoader({{}}, {str(tmp_path)!r}).batches(1); print(next(b).epoch)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_data_needs_no_torch():
    code = "import sys, onward.data.loader; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"

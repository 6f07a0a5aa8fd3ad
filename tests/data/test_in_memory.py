import itertools
import subprocess
import sys
import threading
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.data import prefetch
from onward.data.batches import START, DataCursor
from onward.data.in_memory import InMemoryDataLoader, SyntheticFeature, make_synthetic_loader
from onward.data.shard import FeatureSpec
from onward.errors import DataError, OnwardError, ParametersError


def take(loader, batch_size, count, cursor=START):
    return list(itertools.islice(loader.batches(batch_size, cursor), count))


def values(batches):
    return [batch.features["x"].tolist() for batch in batches]


def test_batches_over_epochs_and_one_pass():
    loader = InMemoryDataLoader({"x": np.arange(5), "y": np.ones((5, 2))})
    assert values(take(loader, 3, 4)) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert values(loader.one_pass(3)) == [[0, 1, 2], [3, 4]]
    assert loader.feature_specs() == {
        "x": FeatureSpec((), np.dtype(np.int64)), "y": FeatureSpec((2,), np.dtype(np.float64)),
    }  # fmt: skip
    dropping = InMemoryDataLoader({"x": np.arange(5)}, last_batch="drop")
    assert values(take(dropping, 2, 3)) == [[0, 1], [2, 3], [0, 1]]
    assert dropping.dropped_samples == 1
    assert values(take(InMemoryDataLoader({"x": np.arange(5)}, last_batch="short"), 4, 3))[1] == [4]


@pytest.mark.parametrize("is_ahead", [False, True])
@settings(max_examples=50, deadline=None)
@given(
    data=st.data(),
    count=st.integers(1, 20),
    batch_size=st.integers(1, 9),
    shuffle=st.booleans(),
)
def test_resuming_equals_never_stopping_and_epochs_are_complete(is_ahead, data, count, batch_size, shuffle):
    with patch.object(prefetch, "WORTH_A_THREAD_BYTES", 0 if is_ahead else 1 << 20):
        check_resuming(data, count, batch_size, shuffle)


def check_resuming(data, count, batch_size, shuffle):
    last_batch = data.draw(st.sampled_from(["wrap", "short", *(["drop"] if batch_size <= count else [])]))
    arrays = {"x": np.arange(count), "z": np.arange(count * 2.0).reshape(count, 2)}
    loader = InMemoryDataLoader(arrays, shuffle=shuffle, seed=4, last_batch=last_batch)
    whole = take(loader, batch_size, 10)
    stop = data.draw(st.integers(0, 9))
    rest = take(
        InMemoryDataLoader(arrays, shuffle=shuffle, seed=4, last_batch=last_batch),
        batch_size,
        9 - stop,
        whole[stop].cursor,
    )
    assert values(rest) == values(whole[stop + 1 :])
    assert [batch.cursor for batch in rest] == [batch.cursor for batch in whole[stop + 1 :]]
    if last_batch != "drop":
        read = list(itertools.chain(*values(whole)))
        for epoch in range(len(read) // count):
            assert sorted(read[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_batches_do_not_share_memory_with_the_data():
    array = np.arange(4)
    batch = take(InMemoryDataLoader({"x": array}), 4, 1)[0]
    batch.features["x"][:] = 9
    assert array.tolist() == [0, 1, 2, 3]


def test_data_that_make_no_sense_are_refused():
    for features in ({}, {"x": np.zeros(0)}, {"x": np.zeros(3), "y": np.zeros(4)}, {"x": np.float32(1)}):
        with pytest.raises(DataError, match="expected at least one feature, and the same number of samples"):
            InMemoryDataLoader(features)
    with pytest.raises(DataError, match="sample 9 of epoch 0, but there are 3 samples"):
        InMemoryDataLoader({"x": np.zeros(3)}).batches(1, DataCursor(epoch=0, sample=9))
    with pytest.raises(DataError, match="an epoch has only 3 samples, fewer than batch_size 4"):
        next(InMemoryDataLoader({"x": np.zeros(3)}, last_batch="drop").batches(4))


def test_synthetic_data_have_the_shapes_dtypes_and_ranges_asked_for():
    features = {
        "tokens": SyntheticFeature((16,), np.int64, 5, 8),
        "image": SyntheticFeature((3, 4), np.float16, -2, 2),
        "flag": SyntheticFeature((), np.bool_, 0, 2),
    }
    loader = make_synthetic_loader(features, 200, seed=1)
    (batch,) = loader.one_pass(200)
    assert {name: (array.shape, str(array.dtype)) for name, array in batch.features.items()} == {
        "tokens": ((200, 16), "int64"), "image": ((200, 3, 4), "float16"), "flag": ((200,), "bool"),
    }  # fmt: skip
    assert set(np.unique(batch.features["tokens"])) == {5, 6, 7}
    assert -2 <= batch.features["image"].min() < -1.9
    assert 1.9 < batch.features["image"].max() <= 2
    assert set(np.unique(batch.features["flag"])) == {False, True}
    (again,) = make_synthetic_loader(features, 200, seed=1).one_pass(200)
    assert all((again.features[name] == array).all() for name, array in batch.features.items())
    with pytest.raises(ParametersError, match=r"the range \[1, 1\) is empty"):
        make_synthetic_loader({"x": SyntheticFeature((), np.int64, 1, 1)}, 3)
    with pytest.raises(ParametersError, match="sample_count is 0"):
        make_synthetic_loader(features, 0)


def test_large_batches_are_assembled_in_the_background_until_the_loader_is_closed():
    others = set(threading.enumerate())
    loader = InMemoryDataLoader({"x": np.zeros((4, 1 << 18))})
    batches = loader.batches(1)
    assert {next(batches).features["x"].nbytes for _ in range(6)} == {1 << 21}
    (thread,) = set(threading.enumerate()) - others
    loader.close()
    assert not thread.is_alive()
    with pytest.raises(OnwardError, match="the data loader was closed while its batches were still being read"):
        list(batches)


def test_a_program_that_leaves_its_batches_open_ends_without_a_word():
    code = """
import numpy as np
from onward.data.in_memory import InMemoryDataLoader
batches = InMemoryDataLoader({"x": np.zeros((4, 1 << 18))}).batches(1)
for _ in range(3):
    next(batches)
np.kept = batches  # alive after the modules of onward have been taken apart
del batches
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stderr

import struct

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onward.data import shard as shard_module
from onward.data.shard import FeatureSpec, load_shard, read_feature_specs
from onward.data.shard_format import encode_sample
from onward.errors import DataError
from tests.data import independent
from tests.data.shards import write


def make_samples(count=10):
    random = np.random.default_rng(0)
    return [
        {
            "tokens": random.integers(0, 99, 7),
            "image": random.random((2, 3), np.float32),
            "label": np.array([k], np.int32),
        }
        for k in range(count)
    ]


def check(shard, samples, names):
    assert shard.sample_count == len(samples)
    assert set(shard.features) == set(names.values())
    for name_in_file, name in names.items():
        array = shard.features[name]
        expected = np.stack([sample[name_in_file] for sample in samples])
        if expected[0].size == 1:
            expected = expected.reshape(len(samples))
        assert array.shape == expected.shape
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


@pytest.fixture(params=["uniform", "parsed"])
def reading(request, monkeypatch):
    """Both ways of reading a file must agree."""
    if request.param == "parsed":
        monkeypatch.setattr(shard_module, "_load_uniform", lambda *_: None)


@pytest.mark.usefixtures("reading")
def test_a_file_of_an_independent_writer_loads(tmp_path):
    samples = make_samples()
    independent.write(tmp_path / "a.pb", samples)
    names = {name: name for name in samples[0]}
    check(load_shard(tmp_path / "a.pb", {}), samples, names)


@pytest.mark.usefixtures("reading")
def test_names_are_mapped_and_a_feature_left_out(tmp_path):
    samples = make_samples()
    names = {"tokens": "input_ids", "label": "y"}
    shard = load_shard(write(tmp_path / "a.pb", samples), {**names, "image": ""})
    check(shard, samples, names)
    assert set(shard.features) == {"input_ids", "y"}


@pytest.mark.usefixtures("reading")
def test_features_of_one_element_have_no_axis_of_their_own(tmp_path):
    sample = {
        "scalar": np.float32(1),
        "one": np.ones(1),
        "matrix": np.ones((1, 1)),
        "two": np.ones(2),
        "none": np.ones(0),
    }
    shard = load_shard(write(tmp_path / "a.pb", [sample] * 3), {})
    shapes = {name: array.shape for name, array in shard.features.items()}
    assert shapes == {"scalar": (3,), "one": (3,), "matrix": (3,), "two": (3, 2), "none": (3, 0)}


@pytest.mark.usefixtures("reading")
def test_of_a_repeated_name_the_last_counts(tmp_path):
    first, last = np.arange(3, dtype=np.int64), np.arange(4, dtype=np.int64)
    data = b"".join(independent.sample([("x", first), ("y", first), ("x", last + k)]) for k in range(3))
    (tmp_path / "a.pb").write_bytes(data)
    shard = load_shard(tmp_path / "a.pb", {})
    np.testing.assert_array_equal(shard.features["x"], [last, last + 1, last + 2])


def test_the_order_of_features_in_a_sample_does_not_matter(tmp_path):
    samples = make_samples(4)
    samples[2] = dict(reversed(samples[2].items()))
    check(load_shard(write(tmp_path / "a.pb", samples), {}), samples, {name: name for name in samples[0]})


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.bool_, ml_dtypes.int4, np.uint8])
def test_element_types(tmp_path, dtype):
    samples = [{"x": np.array([k % 2, 1, 0]).astype(dtype)} for k in range(5)]
    shard = load_shard(write(tmp_path / "a.pb", samples), {})
    assert shard.features["x"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(shard.features["x"], np.stack([sample["x"] for sample in samples]))


def test_typed_fields_load(tmp_path):
    """Their varints give samples of unequal sizes."""
    values = np.array([[1, 2], [300, 4], [5, 70_000]])
    data = b""
    for row in values:
        proto = onnx.helper.make_tensor("x", TensorProto.INT64, [2], row).SerializeToString()
        data += struct.pack("<II", len(proto) + 4, len(proto)) + proto
    (tmp_path / "a.pb").write_bytes(data)
    np.testing.assert_array_equal(load_shard(tmp_path / "a.pb", {}).features["x"], values)


def test_files_larger_than_a_chunk_load(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_module, "_CHUNK_BYTES", 1000)
    samples = make_samples(57)
    check(load_shard(write(tmp_path / "a.pb", samples), {}), samples, {name: name for name in samples[0]})


@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("names", [{}, {"x": "x", "y": "y"}], ids=["all", "named"])
def test_every_truncation_is_an_error_that_names_file_and_offset_or_whole_samples(tmp_path, names):
    samples = [{"x": np.arange(3, dtype=np.int64) + k, "y": np.float32(k)} for k in range(3)]
    whole = write(tmp_path / "whole.pb", samples).read_bytes()
    size = len(whole) // 3
    path = tmp_path / "cut.pb"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        if length and length % size == 0:
            # The format has no count: a file cut between two samples is an entire file of fewer samples.
            assert load_shard(path, names).sample_count == length // size
            continue
        with pytest.raises(DataError) as caught:
            load_shard(path, names)
        message = str(caught.value)
        assert str(path) in message
        if length:
            assert f"sample {length // size}, byte {length // size * size}" in message
        else:
            assert "empty (0 bytes)" in message


@pytest.mark.usefixtures("reading")
def test_every_flipped_byte_gives_data_or_a_data_error(tmp_path):
    """Nothing but DataError comes out of a corrupt file, and no length in it is trusted."""
    samples = [{"x": np.arange(3, dtype=np.int32) + k, "y": np.float32(k)} for k in range(3)]
    whole = write(tmp_path / "whole.pb", samples).read_bytes()
    path, messages = tmp_path / "broken.pb", []
    for position in range(len(whole)):
        for flip in (0x01, 0x80, 0xFF):
            broken = bytearray(whole)
            broken[position] ^= flip
            path.write_bytes(broken)
            try:
                load_shard(path, {"x": "x", "y": "y"})
            except DataError as error:
                messages.append(str(error))
    assert all(str(path) in message for message in messages)
    raw = sum(array.nbytes for sample in samples for array in map(np.asarray, sample.values()))
    assert len(messages) > 0.8 * 3 * (len(whole) - raw)


@pytest.mark.usefixtures("reading")
def test_a_missing_feature_names_those_that_are_there(tmp_path):
    path = write(tmp_path / "a.pb", make_samples())
    with pytest.raises(DataError) as caught:
        load_shard(path, {"token": "input_ids"})
    message = str(caught.value)
    assert "sample 0, byte 0: feature 'token' (for the model's input 'input_ids') is missing" in message
    assert "holds 'image', 'label', 'tokens'; did you mean 'tokens'? Change data.input_name_map" in message


@pytest.mark.usefixtures("reading")
def test_features_that_the_map_does_not_list_keep_their_names(tmp_path):
    samples = make_samples()
    path = write(tmp_path / "a.pb", samples)
    shard = load_shard(path, {"tokens": "input_ids"})
    check(shard, samples, {"tokens": "input_ids", "image": "image", "label": "label"})
    assert set(shard.features) == {"input_ids", "image", "label"}
    assert set(read_feature_specs(path, {"tokens": "input_ids"})) == {"input_ids", "image", "label"}


@pytest.mark.usefixtures("reading")
def test_a_feature_can_be_left_out_and_gives_way_to_one_that_the_map_names(tmp_path):
    path = write(tmp_path / "a.pb", make_samples())
    assert set(load_shard(path, {"image": "", "label": ""}).features) == {"tokens"}
    given = load_shard(path, {"tokens": "label"}).features
    assert set(given) == {"image", "label"}
    np.testing.assert_array_equal(given["label"], load_shard(path, {}).features["tokens"])


def test_features_that_cannot_be_read_are_said_to_be_left_out_how(tmp_path):
    unequal = write(tmp_path / "a.pb", [{"x": np.ones(2), "note": np.ones(n)} for n in (1, 3)])
    with pytest.raises(DataError, match=r'`data\.input_name_map: \{NAME: ""\}` leaves a feature out'):
        load_shard(unequal, {"x": "input"})
    assert set(load_shard(unequal, {"x": "input", "note": ""}).features) == {"input"}


def test_samples_that_differ_are_named(tmp_path):
    samples = make_samples(4)
    size = len(encode_sample(samples[0]))
    longer = {**samples[2], "tokens": np.zeros(8, np.int64)}
    path = write(tmp_path / "a.pb", [*samples[:2], longer, samples[3]])
    with pytest.raises(
        DataError, match=rf"sample 2, byte {2 * size}: feature 'tokens' is int64\[8\], but int64\[7\] in sample 0"
    ):
        load_shard(path, {})
    other = {**samples[2], "tokens": samples[2]["tokens"].astype(np.float64)}
    with pytest.raises(DataError, match=r"sample 1, .*'tokens' is float64\[7\], but int64\[7\] in sample 0"):
        load_shard(write(path, [samples[0], other]), {})
    fewer = {"tokens": samples[1]["tokens"]}
    with pytest.raises(DataError, match=r"sample 1, .*feature 'image' is missing, which sample 0 holds"):
        load_shard(write(path, [samples[0], fewer]), {})
    with pytest.raises(DataError, match=r"sample 1, .*features 'image', 'label' are not in sample 0"):
        load_shard(write(path, [fewer, samples[1]]), {})


def test_a_shape_that_differs_by_an_only_axis_is_named(tmp_path):
    """Both would become [samples]; the bytes have one size only by chance."""
    path = write(tmp_path / "a.pb", [{"x": np.ones((2, 3))}, {"x": np.ones((3, 2))}])
    with pytest.raises(DataError, match=r"float64\[3, 2\], but float64\[2, 3\] in sample 0"):
        load_shard(path, {})


def test_feature_specs_come_from_the_first_sample(tmp_path):
    path = write(tmp_path / "a.pb", make_samples())
    path.write_bytes(path.read_bytes() + b"rubbish")
    assert read_feature_specs(path, {"tokens": "t", "label": "y"}) == {
        "t": FeatureSpec((7,), np.dtype(np.int64)),
        "image": FeatureSpec((2, 3), np.dtype(np.float32)),
        "y": FeatureSpec((), np.dtype(np.int32)),
    }
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataError, match="sample 0, byte 0"):
        read_feature_specs(path, {})

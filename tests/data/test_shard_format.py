"""X"""

import struct

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from onward.data.shard_format import encode_sample, index_shard, read_samples
from onward.errors import DataError
from tests.data import independent
from tests.data.shards import SAMPLES, write


def test_an_independent_reader_reads_what_is_written(tmp_path):
    samples = independent.read(write(tmp_path / "a.pb"))
    assert len(samples) == 4
    for wrote, read in zip(SAMPLES, samples, strict=True):
        assert [name for name, _ in read] == list(wrote)
        for name, array in read:
            np.testing.assert_array_equal(array, wrote[name])
            assert array.dtype == wrote[name].dtype
            assert array.shape == np.shape(wrote[name])


def test_the_bytes_are_those_of_the_independent_writer(tmp_path):
    arrays = [{name: np.asarray(value) for name, value in sample.items()} for sample in SAMPLES]
    independent.write(tmp_path / "b.pb", arrays)
    assert write(tmp_path / "a.pb").read_bytes() == (tmp_path / "b.pb").read_bytes()


@pytest.mark.parametrize(
    "dtype",
    [
        np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float16,
        np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn,
    ],
)  # fmt: skip
def test_every_element_type_is_serialized_as_onnx_does_and_comes_back(tmp_path, dtype):
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    encoded = encode_sample({"x": array})
    assert encoded[8:] == numpy_helper.from_array(array, "x").SerializeToString()
    (tmp_path / "a.pb").write_bytes(encoded)
    (sample,) = read_samples(tmp_path / "a.pb")
    assert sample["x"].dtype == array.dtype
    np.testing.assert_array_equal(sample["x"].astype(np.complex128), array.astype(np.complex128))


def test_big_endian_arrays_are_written_little_endian(tmp_path):
    write(tmp_path / "a.pb", [{"x": np.arange(3, dtype=">i4")}])
    ((_, array),) = independent.read(tmp_path / "a.pb")[0]
    np.testing.assert_array_equal(array, [0, 1, 2])


def test_the_index_finds_every_sample(tmp_path):
    sizes = [3, 20_000, 1, 0, 700, 5]
    samples = [{"x": np.zeros(size, np.int64)} for size in sizes]
    index = index_shard(write(tmp_path / "a.pb", samples))
    ends = np.cumsum([len(encode_sample(sample)) for sample in samples])
    assert index.sample_count == 6
    assert index.byte_count == ends[-1] == (tmp_path / "a.pb").stat().st_size
    np.testing.assert_array_equal(index.offsets, [0, *ends])


def test_an_empty_shard_and_a_missing_one_are_named(tmp_path):
    (tmp_path / "a.pb").touch()
    with pytest.raises(DataError, match=r"a\.pb' is empty \(0 bytes\)"):
        index_shard(tmp_path / "a.pb")
    with pytest.raises(DataError, match=r"b\.pb' cannot be read: No such file"):
        index_shard(tmp_path / "b.pb")


def test_a_cut_off_file_names_sample_offset_expected_and_found(tmp_path):
    path = write(tmp_path / "a.pb")
    size = len(encode_sample(SAMPLES[0]))
    path.write_bytes(path.read_bytes()[: 2 * size + 30])
    with pytest.raises(DataError) as caught:
        index_shard(path)
    message = str(caught.value)
    assert f"'{path}', sample 2, byte {2 * size}: its length field says that {size - 4} bytes follow" in message
    assert "but only 26 are left" in message
    assert "skip_corrupt" in message
    path.write_bytes(path.read_bytes()[: 2 * size + 3])
    with pytest.raises(DataError, match=f"sample 2, byte {2 * size}: its length field has 4 bytes, but only 3"):
        index_shard(path)


def test_a_feature_that_reaches_past_its_sample_is_named(tmp_path):
    path = write(tmp_path / "a.pb")
    size = len(encode_sample(SAMPLES[0]))
    broken = bytearray(path.read_bytes())
    broken[size + 4 : size + 8] = struct.pack("<I", 5000)
    path.write_bytes(broken)
    with pytest.raises(DataError, match=f"sample 1, byte {size + 4}: a feature of 5000 bytes does not fit where only"):
        list(read_samples(path))


@pytest.mark.parametrize(
    ("proto", "words"),
    [
        (TensorProto(data_type=1, dims=[1], raw_data=b"1234"), "a feature without a name"),
        (
            TensorProto(name="x", data_type=1, dims=[2], raw_data=b"1234"),
            r"shape \(2,\) and type float32 needs 8 bytes",
        ),
        (TensorProto(name="x", data_type=1, dims=[2**62], raw_data=b"1234"), "but has 4"),
        (TensorProto(name="x", data_type=1, dims=[-1], raw_data=b"1234"), "cannot be negative"),
        (TensorProto(name="x", data_type=8, dims=[1], string_data=[b"a"]), "has strings; expected numbers"),
        (TensorProto(name="x", dims=[1], raw_data=b"1234"), "has no element type"),
        (TensorProto(name="x", data_type=99, dims=[1], raw_data=b"1234"), "element type 99 cannot be unpacked"),
        (TensorProto(name="x", data_type=7, dims=[3], int64_data=[1]), "cannot be unpacked"),
        (TensorProto(name="x", data_type=7, dims=[1], data_location=1), "another file"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_named(tmp_path, proto, words):
    data = proto.SerializeToString()
    (tmp_path / "a.pb").write_bytes(struct.pack("<II", len(data) + 4, len(data)) + data)
    with pytest.raises(DataError, match=rf"a\.pb', sample 0, byte 4.*{words}"):
        list(read_samples(tmp_path / "a.pb"))


def test_bytes_that_are_no_protobuf_are_named(tmp_path):
    (tmp_path / "a.pb").write_bytes(struct.pack("<II", 8, 4) + b"\xff\xff\xff\xff")
    with pytest.raises(DataError, match=r"sample 0, byte 4: 4 bytes that should be an onnx\.TensorProto are not"):
        list(read_samples(tmp_path / "a.pb"))


def test_typed_fields_are_read(tmp_path):
    proto = onnx.helper.make_tensor("x", TensorProto.INT64, [2, 2], [1, 2, 3, 4])
    assert not proto.HasField("raw_data")
    data = proto.SerializeToString()
    (tmp_path / "a.pb").write_bytes(struct.pack("<II", len(data) + 4, len(data)) + data)
    np.testing.assert_array_equal(next(read_samples(tmp_path / "a.pb"))["x"], [[1, 2], [3, 4]])

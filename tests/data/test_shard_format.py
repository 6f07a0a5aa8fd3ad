import errno
import os
import struct

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from onward.data.shard_format import encode_sample, index_shard, read_samples, write_sample
from onward.data.shard_writer import ShardWriter
from onward.errors import DataError, StorageError
from tests.data import independent

SAMPLES = [
    {"tokens": np.arange(5, dtype=np.int64) + k, "image": np.full((2, 3), k / 2, np.float32), "label": np.int32(k)}
    for k in range(4)
]


def write(path, samples=SAMPLES):
    with ShardWriter(path) as writer:
        for sample in samples:
            writer.write(sample)
    return path


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

import numpy as np
import pytest

from onward.data.packing import ArrayOptions, PackOptions, pack
from onward.data.packing import arrays as arrays_module
from onward.errors import DataError
from tests.data.packing.texts import load


def pack_arrays(source, dest, *names):
    return pack(source, dest, PackOptions(source=ArrayOptions(arrays=names), progress=False))


ARRAYS = {
    "x": np.random.default_rng(0).random((37, 4, 5)).astype(np.float32),
    "fortran": np.asfortranarray(np.random.default_rng(1).random((37, 3))),
    "label": np.arange(37, dtype=np.int32),
    "flag": np.arange(37) % 2 == 0,
}


@pytest.mark.parametrize("savez", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("rows_bytes", [1, 300, 1 << 20])
def test_npz(tmp_path, monkeypatch, savez, rows_bytes):
    monkeypatch.setattr(arrays_module, "_ROWS_BYTES", rows_bytes)
    savez(tmp_path / "a.npz", **ARRAYS)
    pack_arrays(tmp_path / "a.npz", tmp_path / "out")
    features = load(tmp_path / "out")
    assert set(features) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert features[name].dtype == array.dtype
        np.testing.assert_array_equal(features[name], array)


def test_several_npz_follow_each_other(tmp_path):
    (tmp_path / "in").mkdir()
    for k in range(3):
        np.savez(tmp_path / "in" / f"{k}.npz", x=np.full((2, 2), k), other=np.zeros(5))
    pack_arrays(tmp_path / "in", tmp_path / "out", "x")
    np.testing.assert_array_equal(load(tmp_path / "out")["x"][:, 0], [0, 0, 1, 1, 2, 2])


def test_npy_files_stand_side_by_side(tmp_path):
    (tmp_path / "in").mkdir()
    for name, array in ARRAYS.items():
        np.save(tmp_path / "in" / f"{name}.npy", array)
    pack_arrays(tmp_path / "in", tmp_path / "out")
    features = load(tmp_path / "out")
    assert set(features) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(features[name], array)
    pack_arrays(tmp_path / "in" / "x.npy", tmp_path / "one")
    assert set(load(tmp_path / "one")) == {"x"}


def test_arrays_of_unequal_length_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.zeros(4))
    with pytest.raises(DataError, match=r"axis 0 of the arrays counts the samples, but they have {'x': 3, 'y': 4}"):
        pack_arrays(tmp_path / "a.npz", tmp_path / "out")
    with pytest.raises(DataError, match=r"a\.npz' holds no array 'z'; it holds 'x', 'y'"):
        pack_arrays(tmp_path / "a.npz", tmp_path / "out", "z")


def test_broken_and_pickled_files_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((300, 200)))
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(whole[:1000])
    with pytest.raises(DataError, match=r"a\.npz' cannot be read: .* not a complete \.npz"):
        pack_arrays(tmp_path / "a.npz", tmp_path / "out")
    (tmp_path / "a.npz").write_bytes(whole[:5000] + b"\1" + whole[5001:])
    with pytest.raises(DataError, match=r"a\.npz': array 'x' is damaged"):
        pack_arrays(tmp_path / "a.npz", tmp_path / "out")
    np.savez(tmp_path / "p.npz", x=np.array([{}], dtype=object))
    with pytest.raises(DataError, match="holds Python objects"):
        pack_arrays(tmp_path / "p.npz", tmp_path / "out")
    np.save(tmp_path / "p.npy", np.array([{}], dtype=object))
    with pytest.raises(DataError, match=r"p\.npy' cannot be read"):
        pack_arrays(tmp_path / "p.npy", tmp_path / "out")
    np.save(tmp_path / "s.npy", np.array(["a", "b"]))
    with pytest.raises(DataError, match="feature 's' has dtype <U1; a shard holds numbers"):
        pack_arrays(tmp_path / "s.npy", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_mixed_and_ambiguous_files_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"1 \.npz and 1 \.npy files"):
        pack_arrays(tmp_path, tmp_path / "out")


def test_an_archive_of_nothing_and_a_damaged_compressed_one_are_refused(tmp_path):
    np.savez(tmp_path / "empty.npz")
    with pytest.raises(DataError, match=r"archive '.*empty\.npz' holds no arrays"):
        pack_arrays(tmp_path / "empty.npz", tmp_path / "out")
    np.savez_compressed(tmp_path / "c.npz", x=np.random.default_rng(0).random((300, 200)))
    whole = (tmp_path / "c.npz").read_bytes()
    for place, words in ((100_000, "is damaged after row"), (60, "cannot be read")):
        (tmp_path / "c.npz").write_bytes(whole[:place] + bytes(40) + whole[place + 40 :])
        with pytest.raises(DataError, match=rf"c\.npz': array 'x' {words}"):
            pack_arrays(tmp_path / "c.npz", tmp_path / "out")
    assert not (tmp_path / "out").exists()

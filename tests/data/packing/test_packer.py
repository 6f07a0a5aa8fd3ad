"""X"""

import json

import numpy as np
import pytest

from onward.data import DataLoader, read_samples
from onward.data.manifest import read_manifest
from onward.data.packing import ArrayOptions, PackOptions, TableOptions, TextOptions, pack
from onward.data.packing import packer as packer_module
from onward.errors import DataError, ParametersError, StorageError
from tests.data import independent
from tests.data.packing.archives import QUIET, save


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_independent_reader_reads_what_is_packed(tmp_path):
    pack(save(tmp_path / "a.npz"), tmp_path / "out", PackOptions(samples_per_file=4, **QUIET))
    shards = sorted((tmp_path / "out").glob("*.pb"))
    assert [shard.name for shard in shards] == ["shard-000000.pb", "shard-000001.pb", "shard-000002.pb"]
    samples = [sample for shard in shards for sample in independent.read(shard)]
    assert len(samples) == 10
    for number, sample in enumerate(samples):
        (name, x), (label_name, label) = sample
        assert (name, label_name) == ("x", "label")
        assert label.shape == ()
        assert label == number
        np.testing.assert_array_equal(x, np.arange(3, dtype=np.float32) + 3 * number)


def test_the_manifest_says_what_the_shards_hold(tmp_path):
    summary = pack(save(tmp_path / "a.npz"), tmp_path / "out", PackOptions(samples_per_file=4, seed=5, **QUIET))
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest == summary.folders[tmp_path / "out"]
    assert manifest.sample_count == summary.sample_count == 10
    assert manifest.features == {"x": {"dtype": "float32", "shape": [3]}, "label": {"dtype": "int64", "shape": []}}
    assert [(entry.file, entry.samples) for entry in manifest.shards] == [
        ("shard-000000.pb", 4), ("shard-000001.pb", 4), ("shard-000002.pb", 2),
    ]  # fmt: skip
    assert all(entry.bytes == (tmp_path / "out" / entry.file).stat().st_size for entry in manifest.shards)
    assert (manifest.kind, manifest.options["seed"], manifest.options["samples_per_file"]) == ("arrays", 5, 4)
    assert "10 samples in 3 shards," in summary.describe()
    assert "10 samples in 1 shard," in pack(tmp_path / "a.npz", tmp_path / "one", PackOptions(**QUIET)).describe()
    assert json.loads((tmp_path / "out" / "pack.json").read_text())["format"] == "onward-pack"


def test_packing_is_deterministic(tmp_path):
    save(tmp_path / "a.npz", 50)
    options = PackOptions(samples_per_file=7, test_fraction=0.3, shuffle_buffer=10, seed=3, **QUIET)
    for out in ("one", "two"):
        pack(tmp_path / "a.npz", tmp_path / out, options)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_train_and_test_share_the_samples(tmp_path):
    summary = pack(save(tmp_path / "a.npz", 1000), tmp_path / "out", PackOptions(test_fraction=0.2, **QUIET))
    assert list(summary.folders) == [tmp_path / "out" / "train", tmp_path / "out" / "test"]
    labels = [
        [
            int(sample["label"])
            for path in sorted((tmp_path / "out" / split).glob("*.pb"))
            for sample in read_samples(path)
        ]
        for split in ("train", "test")
    ]
    assert sorted(labels[0] + labels[1]) == list(range(1000))
    assert labels == [sorted(part) for part in labels]
    assert 150 < len(labels[1]) < 250  # 200 expected, standard deviation 12.6
    with pytest.raises(DataError, match=r"holds no \.pb files, but its folders 'test', 'train' do"):
        DataLoader({}, tmp_path / "out")


def test_too_few_samples_for_a_test_set_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no sample of .* fell into 'test' with test_fraction 0.001"):
        pack(save(tmp_path / "a.npz"), tmp_path / "out", PackOptions(test_fraction=0.001, **QUIET))
    assert not (tmp_path / "out").exists()


def test_a_shuffle_buffer_mixes_and_keeps_every_sample(tmp_path):
    pack(save(tmp_path / "a.npz", 60), tmp_path / "out", PackOptions(shuffle_buffer=20, **QUIET))
    labels = [int(sample["label"]) for sample in read_samples(tmp_path / "out" / "shard-000000.pb")]
    assert sorted(labels) == list(range(60))
    assert labels != list(range(60))


def test_features_are_cast(tmp_path):
    options = PackOptions(cast=(("x", "float16"), ("label", "bfloat16")), **QUIET)
    pack(save(tmp_path / "a.npz"), tmp_path / "out", options)
    specs = DataLoader({}, tmp_path / "out").feature_specs()
    assert {name: str(spec.dtype) for name, spec in specs.items()} == {"x": "float16", "label": "bfloat16"}
    with pytest.raises(ParametersError, match="--cast names 'y'; the samples hold 'x', 'label'"):
        pack(tmp_path / "a.npz", tmp_path / "no", PackOptions(cast=(("y", "int8"),), **QUIET))
    with pytest.raises(ParametersError, match="--cast x=str: expected a dtype of numbers"):
        pack(tmp_path / "a.npz", tmp_path / "no", PackOptions(cast=(("x", "str"),), **QUIET))


def test_a_destination_that_holds_shards_is_refused_unless_overwritten(tmp_path):
    save(tmp_path / "a.npz")
    out = tmp_path / "out"
    pack(tmp_path / "a.npz", out, PackOptions(samples_per_file=1, **QUIET))
    (out / "notes.txt").write_text("mine")
    before = tree(out)
    with pytest.raises(DataError, match=r"already holds 11 files of packed data, the first 'pack.json'.*--overwrite"):
        pack(tmp_path / "a.npz", out, PackOptions(**QUIET))
    assert tree(out) == before
    pack(tmp_path / "a.npz", out, PackOptions(overwrite=True, test_fraction=0.5, **QUIET))
    assert sorted(tree(out)) == [
        "notes.txt", "test/pack.json", "test/shard-000000.pb", "train/pack.json", "train/shard-000000.pb"
    ]  # fmt: skip
    pack(tmp_path / "a.npz", out, PackOptions(overwrite=True, **QUIET))
    assert sorted(tree(out)) == ["notes.txt", "pack.json", "shard-000000.pb"]
    assert [path.name for path in out.iterdir() if path.is_dir()] == []


def test_a_destination_that_is_a_file_is_refused(tmp_path):
    save(tmp_path / "a.npz")
    with pytest.raises(DataError, match=r"destination .* is a file; give a directory"):
        pack(tmp_path / "a.npz", tmp_path / "a.npz")


def test_a_loader_notices_shards_that_were_lost_or_cut_at_a_sample(tmp_path):
    """What the format alone cannot tell: a file cut between two samples, and a file that is gone."""
    out = tmp_path / "out"
    pack(save(tmp_path / "a.npz"), out, PackOptions(samples_per_file=5, **QUIET))
    whole = (out / "shard-000001.pb").read_bytes()
    (out / "shard-000001.pb").write_bytes(whole[: len(whole) // 5 * 4])
    with pytest.raises(
        DataError, match=rf"shard-000001\.pb' has \d+ bytes, but pack\.json says {len(whole)} \(5 samples"
    ):
        DataLoader({}, out)
    loader = DataLoader({}, out, skip_corrupt=True)
    assert [path.name for path in loader.skipped_files] == ["shard-000001.pb"]
    assert sum(batch.sample_count for batch in loader.one_pass(3)) == loader.sample_count == 5
    (out / "shard-000001.pb").unlink()
    with pytest.raises(DataError, match=r"shard-000001\.pb' is missing; pack\.json lists it with 5 samples"):
        DataLoader({}, out)
    assert "is missing" in DataLoader({}, out, skip_corrupt=True).messages[0]
    (out / "pack.json").write_text("{}")
    with pytest.raises(DataError, match=r"pack\.json' is damaged"):
        DataLoader({}, out)


def test_sample_counts_come_from_the_manifest_without_reading(tmp_path, monkeypatch):
    pack(save(tmp_path / "a.npz"), tmp_path / "out", PackOptions(samples_per_file=3, **QUIET))
    monkeypatch.setattr("onward.data.loader.index_shard", None)
    assert DataLoader({}, tmp_path / "out").sample_count == 10


def test_samples_that_differ_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": [1, 2]}\n{"x": [1, 2, 3]}\n')
    with pytest.raises(DataError, match=r"sample 1 differs from those before it: 'x' is int64\[3\], was int64\[2\]"):
        pack(tmp_path / "a.jsonl", tmp_path / "out", PackOptions(**QUIET))


def test_kinds_are_found_out_or_asked_for(tmp_path):
    with pytest.raises(DataError, match="nothing' does not exist; give a file or a folder"):
        pack(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "a.xyz").write_text("hello")
    with pytest.raises(DataError, match=r"is not clear from its suffix .* pass --kind text"):
        pack(tmp_path / "a.xyz", tmp_path / "out")
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.csv").write_text("x\n1\n")
    (folder / "b.txt").write_text("hello hello")
    with pytest.raises(DataError, match=r"2 files: 1 of text, 1 of table. Pass --kind text, .* keep files of one kind"):
        pack(folder, tmp_path / "out")
    assert pack(folder, tmp_path / "a", PackOptions(source=TableOptions(), **QUIET)).kind == "table"
    assert pack(folder, tmp_path / "b", PackOptions(pattern="*.csv", **QUIET)).kind == "table"
    for name in "cdefg":
        (folder / f"{name}.csv").write_text("x\n1\n")
    few = pack(folder, tmp_path / "few", PackOptions(**QUIET))
    assert (few.kind, few.sample_count) == ("table", 6)
    assert "ignored files: 1 of other kinds than table: 'b.txt'" in few.describe()
    text = PackOptions(source=TextOptions(sequence_length=4), **QUIET)
    assert pack(folder, tmp_path / "c", text).sample_count == 2
    with pytest.raises(DataError, match=r"holds no files with the suffix \.npz, \.npy \(arrays\)"):
        pack(folder, tmp_path / "out", PackOptions(source=ArrayOptions()))
    with pytest.raises(DataError, match=r"holds no files with the suffix \.csv"):
        pack(folder, tmp_path / "out", PackOptions(source=TableOptions(), exclude=("*.csv",)))


def test_a_source_of_no_samples_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((0, 3)))
    with pytest.raises(DataError, match=r"a\.npz' gave no samples; nothing was packed: it has no samples\. Pass"):
        pack(tmp_path / "a.npz", tmp_path / "out", PackOptions(**QUIET))
    assert not (tmp_path / "out").exists()


def test_a_disk_that_refuses_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    save(tmp_path / "a.npz")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot make the directory '.*file/out': Not a directory"):
        pack(tmp_path / "a.npz", tmp_path / "file" / "out", PackOptions(**QUIET))

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packer_module, "publish", refuse)
    with pytest.raises(StorageError, match=r"cannot pack into '.*out': No space left on device\. Nothing was left"):
        pack(tmp_path / "a.npz", tmp_path / "out", PackOptions(**QUIET))
    assert not (tmp_path / "out").exists()

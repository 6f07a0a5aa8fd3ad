"""Folders that are divided into training and evaluation data: what counts as one, and that both are packed alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from onward.cli import main
from onward.data.manifest import read_manifest
from onward.data.packing.options import PackOptions, TableOptions, TextOptions
from onward.data.packing.packer import pack
from onward.data.packing.splits import EVALUATION_NAMES, find_splits
from onward.data.shard_format import read_samples
from onward.errors import DataError, ParametersError


def write(folder: Path, **files: str) -> Path:
    """Writes files; `a__b__c` is `a/b.c`."""
    for name, content in files.items():
        *folders, stem, suffix = name.split("__")
        place = folder.joinpath(*folders)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{stem}.{suffix}").write_text(content)
    return folder


def samples(folder: Path) -> list[dict[str, np.ndarray]]:
    return [sample for shard in sorted(folder.glob("*.pb")) for sample in read_samples(shard)]


@pytest.mark.parametrize("name", EVALUATION_NAMES)
@pytest.mark.parametrize("form", ["folders", "files"])
def test_every_name_of_evaluation_data(name: str, form: str, tmp_path: Path) -> None:
    if form == "folders":
        write(tmp_path, train__a__csv="x\n1\n", **{f"{name}__a__csv": "x\n1\n"})
    else:
        write(tmp_path, train__csv="x\n1\n", **{f"{name}__csv": "x\n1\n"})
    found = find_splits(tmp_path)
    assert found is not None
    assert (found.train.stem, found.test.stem, found.unused) == ("train", name, ())


def test_validation_data_are_evaluated_and_test_data_are_left(tmp_path: Path) -> None:
    write(tmp_path, Train__a__csv="x\n1\n", Test__a__csv="x\n2\n", Val__a__csv="x\n3\n", README__md="Hello")
    found = find_splits(tmp_path)
    assert found is not None
    assert (found.train.name, found.test.name) == ("Train", "Val")
    assert [one.name for one in found.unused] == ["Test"]


@pytest.mark.parametrize(
    "files",
    [
        {"train__a__csv": "x\n1\n"},
        {"val__a__csv": "x\n1\n", "test__a__csv": "x\n1\n"},
        {"train__a__csv": "x\n1\n", "test__a__csv": "x\n1\n", "bus__a__csv": "x\n1\n"},
        {"train__a__csv": "x\n1\n", "test__a__csv": "x\n1\n", "more__csv": "x\n1\n"},
        {"train__csv": "x\n1\n", "test__csv": "x\n1\n", "third__csv": "x\n1\n"},
        {"train__csv": "x\n1\n", "test__npz": ""},
    ],
)
def test_other_folders_are_not_divided(files: dict[str, str], tmp_path: Path) -> None:
    assert find_splits(write(tmp_path, **files)) is None


def test_words_have_the_same_numbers_in_both_parts_of_a_table(tmp_path: Path) -> None:
    """Also where each part has words that the other lacks."""
    write(tmp_path / "trees", train__a__csv="x,tree\n1,oak\n2,fir\n", val__a__csv="x,tree\n3,elm\n4,oak\n")
    options = PackOptions(source=TableOptions(categories=("tree",)))
    summary = pack(tmp_path / "trees", tmp_path / "packed", options)
    assert [folder.name for folder in summary.folders] == ["train", "test"]
    trees = {part: [int(one["tree"]) for one in samples(tmp_path / "packed" / part)] for part in ("train", "test")}
    assert trees == {"train": [2, 1], "test": [0, 2]}
    manifest = read_manifest(tmp_path / "packed" / "test")
    assert manifest is not None
    assert manifest.details["categories"] == {"tree": ["elm", "fir", "oak"]}
    assert manifest.options["test_source"] == str(tmp_path / "trees" / "val")


def test_pictures_are_of_the_classes_of_the_training_part(tmp_path: Path) -> None:
    """A part without some class does not shift the numbers of the others."""
    for part, names in (("train", "abc"), ("valid", "c")):
        for name in names:
            folder = tmp_path / "pictures" / part / name
            folder.mkdir(parents=True)
            for k in range(2):
                Image.new("L", (4, 4), 80 * "abc".index(name)).save(folder / f"{k}.png")
    assert main(["pack", str(tmp_path / "pictures"), str(tmp_path / "packed"), "--image-size", "4"]) == 0
    assert sorted(int(one["label"]) for one in samples(tmp_path / "packed" / "train")) == [0, 0, 1, 1, 2, 2]
    assert [int(one["label"]) for one in samples(tmp_path / "packed" / "test")] == [2, 2]
    (tmp_path / "pictures" / "valid" / "c").rename(tmp_path / "pictures" / "valid" / "d")
    with pytest.raises(DataError) as raised:
        pack(tmp_path / "pictures", tmp_path / "again")
    assert "has 1 class folders that" in str(raised.value)
    assert "the first 'd'; the classes are 'a', 'b', 'c'. Add training images of these classes" in str(raised.value)
    assert not (tmp_path / "again").exists()


def test_arrays_and_another_folder_as_test_source(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    parts = {name: generator.standard_normal((count, 3)).astype(np.float32) for name, count in (("one", 7), ("two", 4))}
    for name, array in parts.items():
        np.savez(tmp_path / f"{name}.npz", x=array)
    packed = tmp_path / "packed"
    assert main(["pack", str(tmp_path / "one.npz"), str(packed), "--test-source", str(tmp_path / "two.npz")]) == 0
    for part, name in (("train", "one"), ("test", "two")):
        np.testing.assert_array_equal(np.stack([one["x"] for one in samples(packed / part)]), parts[name])


def test_text_has_the_tokenizer_of_the_training_part(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    words = "the quick brown fox jumps over the lazy dog. "
    write(tmp_path / "text", train__txt=words * 60, valid__txt="zebras " * 60)
    options = PackOptions(source=TextOptions(sequence_length=8, tokenizer="bpe", vocabulary_size=300))
    pack(tmp_path / "text", tmp_path / "packed", options)
    own, alone = tmp_path / "packed" / "test", tmp_path / "alone"
    assert (own / "tokenizer.json").read_text() == (tmp_path / "packed" / "train" / "tokenizer.json").read_text()
    given = TextOptions(sequence_length=8, tokenizer=str(own / "tokenizer.json"))
    pack(tmp_path / "text" / "valid.txt", alone, PackOptions(source=given))
    assert [one["tokens"].tolist() for one in samples(own)] == [one["tokens"].tolist() for one in samples(alone)]


def test_parts_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "wide", train__a__csv="x,y\n1,2\n", test__a__csv="x,y\n1,2.5\n")
    with pytest.raises(DataError, match=r"column 'y' holds '2\.5', but whole numbers before"):
        pack(tmp_path / "wide", tmp_path / "packed")
    (tmp_path / "arrays").mkdir()
    for name, width in (("train", 3), ("val", 4)):
        np.savez(tmp_path / "arrays" / f"{name}.npz", x=np.zeros((2, width), np.float32))
    with pytest.raises(DataError) as raised:
        pack(tmp_path / "arrays", tmp_path / "packed")
    assert "differ from the training samples: 'x' is float32 [4], in training float32 [3]" in str(raised.value)
    with pytest.raises(
        ParametersError, match=r"test_fraction is 0.2, but '.*wide' has test data, 'test'. Leave it out"
    ):
        pack(tmp_path / "wide", tmp_path / "packed", PackOptions(test_fraction=0.2))
    with pytest.raises(ParametersError, match=r"test_fraction is 0.2, but the test data are 'there'; leave one out"):
        PackOptions(test_fraction=0.2, test_source="there")
    assert not (tmp_path / "packed").exists()

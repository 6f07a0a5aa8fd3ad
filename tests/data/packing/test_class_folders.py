"""Folders whose names are classes: what a file is called in messages, splits of their own, a fixed order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onward.data.packing.class_folders import ClassFiles, open_class_folders
from onward.errors import DataError


def sizes(shuffle_seed: int | None = None) -> ClassFiles:
    return ClassFiles(
        feature="size",
        word="note",
        decode=lambda path: np.array(path.stat().st_size),
        skips_unreadable=False,
        shuffle_seed=shuffle_seed,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("b/x", "a/deeper/y", "a/z", "c/w")):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"." * number)
    return tmp_path / "in"


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read(*given: object, seed: int | None = None) -> list[tuple[str, int, int]]:
    source = open_class_folders(sizes(seed), *given)
    return [
        (split, int(one["size"]), int(one["label"])) for split, one in source.read(lambda _: "train", lambda _: None)
    ]


def test_classes_are_numbered_in_the_order_of_names(folder: Path) -> None:
    assert read(folder, files(folder)) == [("train", 1, 0), ("train", 2, 0), ("train", 0, 1), ("train", 3, 2)]
    shuffled = read(folder, files(folder), seed=1)
    assert sorted(shuffled) == sorted(read(folder, files(folder)))
    assert shuffled != read(folder, files(folder))
    assert shuffled == read(folder, files(folder), seed=1)


def test_a_folder_for_testing_has_the_classes_of_the_other(folder: Path, tmp_path: Path) -> None:
    test = tmp_path / "test"
    (test / "c").mkdir(parents=True)
    (test / "c" / "v").write_bytes(b"12345")
    assert read(folder, files(folder), test, files(test))[-1] == ("test", 5, 2)
    (test / "d").mkdir()
    (test / "d" / "u").write_bytes(b"")
    words = (
        r"has 1 class folders that '.*in' lacks, the first 'd'; the classes are 'a', 'b', 'c'\. Add training notes of"
    )
    with pytest.raises(DataError, match=words):
        read(folder, files(folder), test, files(test))


def test_what_is_in_no_class_folder_is_refused(folder: Path) -> None:
    (folder / "stray").write_bytes(b"")
    with pytest.raises(DataError, match=r"^note '.*stray' is in no class folder; expected '.*CLASS/stray'"):
        read(folder, files(folder))
    with pytest.raises(
        DataError, match=r"stray' is one file; notes are packed from a folder with one folder per class"
    ):
        read(folder / "stray", [folder / "stray"])

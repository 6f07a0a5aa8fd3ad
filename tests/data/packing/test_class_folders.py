"""Folders whose names are classes: what a file is called in messages, splits of their own, a fixed order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onward.data.packing.class_folders import ClassFiles, open_class_folders
from onward.data.packing.source import find_source_files
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


def of_images(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize("kind", [None, "images"])
def test_a_class_does_not_vanish(kind: str | None, tmp_path: Path) -> None:
    """Those after it would get its number."""
    source = of_images(tmp_path / "in", "a/1.heic", "a/2.heic", "b/1.png", "c/1.png")
    words = (
        r"has the class folder 'a' without files to read \(images: \.png, .*holds 2 files, '1\.heic', '2\.heic'\. Conv"
    )
    with pytest.raises(DataError, match=words):
        find_source_files(source, kind)
    assert [path.parent.name for path in find_source_files(source, kind, exclude=("a",)).paths] == ["b", "c"]
    with pytest.raises(DataError, match="'a' without files"):
        find_source_files(source, kind, pattern="*.png")


def test_an_empty_class_folder_and_a_link_are_refused(tmp_path: Path) -> None:
    source = of_images(tmp_path / "in", "b/1.png", "c/1.png")
    (source / "d").mkdir()
    with pytest.raises(DataError, match=r"'d' without files .*: it holds nothing"):
        find_source_files(source, None)
    (source / "d").rmdir()
    (source / "d").symlink_to(source / "c")
    with pytest.raises(DataError, match=r"'d' without files .*: it is a link, which is not followed"):
        find_source_files(source, None)


def test_files_that_are_not_read_are_reported(tmp_path: Path) -> None:
    source = of_images(tmp_path / "in", "a/1.heic", "a/2.png", "b/1.png")
    assert find_source_files(source, "images").describe_ignored() == "1 of other kinds than images: '1.heic'"

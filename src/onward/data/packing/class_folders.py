"""Folders whose names are the classes of the files in them: images, recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onward.data.packing.source import Advance, ChooseSplit, Read, Sample, Source
from onward.data.packing.splits import one_after_the_other
from onward.errors import DataError


class UnreadableFileError(DataError):
    """A file of a class folder cannot be decoded; such files can be left out."""


@dataclass(frozen=True, kw_only=True)
class ClassFiles:
    """What the files in class folders are, and how they are read.

    Attributes:
        feature: the name of what a file gives: audio.
        word: for one of them: recording.
        decode: from a file to the feature; `ValueError` and `OSError` say that it cannot be decoded.
        skips_unreadable: files that cannot be decoded are left out.
        shuffle_seed: of the order in which files are packed; None: that of their classes and names.
        remark: what is odd about a feature, as a name in the manifest, which counts them; "": nothing.
    """

    feature: str
    word: str
    decode: Callable[[Path], np.ndarray]
    skips_unreadable: bool
    shuffle_seed: int | None
    remark: Callable[[np.ndarray], str] = lambda value: ""

    @property
    def unit(self) -> str:
        """The word for several."""
        return f"{self.word}s"


def open_class_folders(
    files: ClassFiles,
    folder: Path,
    paths: Sequence[Path],
    test_folder: Path | None = None,
    test_paths: Sequence[Path] = (),
) -> Source:
    """Opens a folder whose folders are classes, numbered in the order of their names; and another for testing alone.

    Raises:
        DataError: a file is in no class folder, or the test folder has a class that the other one lacks.
    """
    names = _class_names(files, folder, paths)
    classes = sorted(set(names))
    counts = {name: names.count(name) for name in classes}
    details: dict[str, Any] = {"classes": classes, f"{files.unit}_per_class": counts}
    read: Read = partial(_read, files, _labelled(files, paths, names, classes), details, counts)
    if test_folder is not None:
        test_names = _class_names(files, test_folder, test_paths)
        _check_classes(files, test_folder, test_names, folder, classes)
        read = one_after_the_other(
            read, partial(_read, files, _labelled(files, test_paths, test_names, classes), details, {})
        )
    return Source(unit=files.unit, total=len(paths) + len(test_paths), read=read, details=details)


def _class_names(files: ClassFiles, folder: Path, paths: Sequence[Path]) -> list[str]:
    """The class of each file."""
    if folder.is_file():
        raise DataError(
            f"{str(folder)!r} is one file; {files.unit} are packed from a folder with one folder per class."
        )
    names = []
    for path in paths:
        parts = path.relative_to(folder).parts
        if len(parts) < 2:
            raise DataError(
                f"{files.word} {str(path)!r} is in no class folder; expected {str(folder / 'CLASS' / path.name)!r}: "
                "the class is the name of the folder inside the source."
            )
        names.append(parts[0])
    return names


def _labelled(
    files: ClassFiles, paths: Sequence[Path], names: Sequence[str], classes: Sequence[str]
) -> list[tuple[Path, int]]:
    """Files with the numbers of their classes, in the order in which they are packed."""
    order = np.arange(len(paths))
    if files.shuffle_seed is not None:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([files.shuffle_seed, 3])))
        order = generator.permutation(len(paths))
    return [(paths[k], classes.index(names[k])) for k in order.tolist()]


def _check_classes(
    files: ClassFiles, test_folder: Path, found: Sequence[str], folder: Path, classes: Sequence[str]
) -> None:
    unknown = sorted(set(found) - set(classes))
    if unknown:
        raise DataError(
            f"test folder {str(test_folder)!r} has {len(unknown)} class folders that {str(folder)!r} lacks, the first "
            f"{unknown[0]!r}; the classes are {', '.join(map(repr, classes))}. Add training {files.unit} of these "
            "classes, or remove them from the test folder."
        )


def _read(
    files: ClassFiles,
    labelled: list[tuple[Path, int]],
    details: dict[str, Any],
    counts: dict[str, int],
    choose_split: ChooseSplit,
    advance: Advance,
) -> Iterator[tuple[str, Sample]]:
    """Decodes files; `counts` of those of each class are kept, and none may lose all of them; {}: not counted."""
    skipped: list[str] = []
    number = 0
    for path, label in labelled:
        advance(1)
        try:
            value = files.decode(path)
        except (OSError, ValueError) as error:
            if not files.skips_unreadable:
                raise UnreadableFileError(
                    f"{files.word} {str(path)!r} cannot be decoded: {error}. Replace it, or leave such "
                    f"{files.unit} out with onward pack --unreadable skip."
                ) from error
            skipped.append(str(path))
            _count_skipped(files, details["classes"][label], counts, f"{str(path)!r}: {error}")
            continue
        if remark := files.remark(value):
            first = {"count": 0, "first": "/".join(path.parts[-2:])}
            details.setdefault(f"{files.unit}_{remark}", first)["count"] += 1
        yield choose_split(number), {files.feature: value, "label": np.array(label, np.int64)}
        number += 1
    if skipped:
        details[f"{files.unit}_skipped"] = [*details.get(f"{files.unit}_skipped", ()), *skipped]


def _count_skipped(files: ClassFiles, name: str, counts: dict[str, int], last: str) -> None:
    """Refuses a class that loses its last file: nothing would teach the model this number."""
    if name not in counts:
        return
    counts[name] -= 1
    if counts[name] == 0:
        raise DataError(
            f"none of the {files.unit} of class {name!r} can be decoded, the last one {last}. Replace them; or leave "
            f"the class out: move its folder elsewhere, or pass --exclude {name!r} to onward pack."
        )

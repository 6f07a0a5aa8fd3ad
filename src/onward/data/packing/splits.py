"""A folder that is divided into training and evaluation data already: `train` and `val`, as data sets are published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onward.data.packing.source import SUFFIXES, Advance, ChooseSplit, Read, Sample

TRAINING_NAMES = ("train", "training")
EVALUATION_NAMES = ("val", "valid", "validation", "dev", "test", "testing", "eval")
"""In the order of preference: data for the choice of a model come before those for its final evaluation."""


@dataclass(frozen=True)
class Splits:
    """The parts of a divided folder.

    Attributes:
        train: folder or file of training data.
        test: of those to evaluate while training.
        unused: further parts.
    """

    train: Path
    test: Path
    unused: tuple[Path, ...] = ()


def find_splits(folder: Path) -> Splits | None:
    """The parts of a folder whose data are all in folders, or files, named after what they are for; else None."""
    if not folder.is_dir():
        return None
    entries = [entry for entry in sorted(folder.iterdir()) if not entry.name.startswith(".")]
    folders = [entry for entry in entries if entry.is_dir()]
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in _SUFFIXES]
    if folders:
        kinds = {kind for one in folders if (kind := _kind_below(one)) is not None}
        return None if any(_kind_of(file) in kinds for file in files) else _arrange(folders)
    return _arrange(files) if len({file.suffix.lower() for file in files}) == 1 else None


def _arrange(entries: list[Path]) -> Splits | None:
    named = {_name(entry): entry for entry in entries}
    if len(named) != len(entries) or not set(named) <= {*TRAINING_NAMES, *EVALUATION_NAMES}:
        return None
    train = [named[name] for name in TRAINING_NAMES if name in named]
    tests = [named[name] for name in EVALUATION_NAMES if name in named]
    return Splits(train[0], tests[0], tuple(tests[1:])) if len(train) == 1 and tests else None


def _name(entry: Path) -> str:
    return (entry.stem if entry.is_file() else entry.name).lower()


_SUFFIXES = {suffix for suffixes in SUFFIXES.values() for suffix in suffixes}


def _kind_of(file: Path) -> str | None:
    return next((kind for kind, suffixes in SUFFIXES.items() if file.suffix.lower() in suffixes), None)


def _kind_below(folder: Path) -> str | None:
    """The kind of the first file of a known one below a folder."""
    return next((kind for file in folder.rglob("*") if (kind := _kind_of(file)) is not None), None)


def one_after_the_other(train: Read, test: Read) -> Read:
    """Training files first, then test files, all of whose samples are for testing."""
    return partial(_read, train, test)


def _read(train: Read, test: Read, choose_split: ChooseSplit, advance: Advance) -> Iterator[tuple[str, Sample]]:
    yield from train(lambda _: "train", advance)
    yield from test(lambda _: "test", advance)

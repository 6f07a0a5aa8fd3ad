"""What is known of data without packing them, as values: features with types, shapes and a sample of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

WORDS = "words"
"""The dtype of a column of words."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature, or one column of a table.

    Attributes:
        name: in the data.
        dtype: numpy's name; "words" for text.
        shape: of one sample.
        values: of some samples, along axis 0; None for words.
        words: the different words, sorted, as far as they were seen.
        missing: rows without a value, as far as they were seen.
        codes: of a column of words: for each row that has a word, a number that stands for it.
        not_numbers: of a column of words nearly all of which are numbers, the others: where, and what they are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: np.ndarray | None = None
    words: tuple[str, ...] = ()
    missing: int = 0
    codes: np.ndarray | None = None
    not_numbers: tuple[tuple[str, str], ...] = ()

    @property
    def is_integer(self) -> bool:
        """Whether every value seen is a whole number."""
        return self.values is not None and self.values.dtype.kind in "iub"

    def holds_whole_numbers(self) -> bool:
        """Whether all values seen are whole numbers, whatever their type."""
        return self.values is not None and bool((self.values == np.round(self.values.astype(np.float64))).all())

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Data as far as a proposal needs them.

    Attributes:
        path: as the user named it.
        kind: `packed`, or the kind of source as `onward pack` calls it.
        features: of one sample; for tables its columns; for text none but what packing makes.
        sample_count: of all, or of the training part of data that have a test part.
        test_count: of the test part of packed data.
        test: what the test part holds, of data that are divided but not packed.
        unused: further parts, such as a `test` next to a `val`.
        is_counted: false where the count is an estimate.
        train_dir, test_dir: of packed data.
        classes: names of the classes, where the data name them.
        are_pairs: every feature has an axis of 2 first, a chosen and a rejected answer.
        bytes: of text.
        sample_rate: of recordings, in Hz: that of most.
        median_length: of recordings, in samples at that rate; 0: not known.
        missing_rows: rows of a table that lack a value.
        asked_kind: the kind of source that the user chose; None: suffixes told it.
        ignored: which files of a folder are not read, being of other kinds; "": none.
    """

    path: Path
    kind: str
    features: tuple[Feature, ...]
    sample_count: int
    test_count: int = 0
    is_counted: bool = True
    train_dir: Path | None = None
    test_dir: Path | None = None
    classes: tuple[str, ...] = ()
    are_pairs: bool = False
    bytes: int = 0
    sample_rate: int = 0
    median_length: int = 0
    missing_rows: int = 0
    delimiter: str = ","
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    test: DataFacts | None = None
    unused: tuple[Path, ...] = ()
    asked_kind: str | None = None
    ignored: str = ""

    def feature(self, name: str) -> Feature | None:
        """The feature of this name."""
        return next((feature for feature in self.features if feature.name == name), None)

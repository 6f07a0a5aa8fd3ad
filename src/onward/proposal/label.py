"""The label of a proposal: what its values may stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onward.data.packing.transforms import IGNORED_LABEL
from onward.proposal.data_facts import WORDS, Feature


@dataclass(frozen=True)
class Label:
    """The feature that the prediction is compared with, as it will be packed.

    Attributes:
        feature: of the data; of words, once they are numbers.
        classes: names of the classes, where the data have names.
    """

    feature: Feature
    classes: tuple[str, ...] = ()

    @property
    def are_whole(self) -> bool:
        """Whether they may be classes: whole numbers, or words."""
        return self.feature.dtype == WORDS or self.feature.holds_whole_numbers()

    @property
    def lowest(self) -> int:
        """The smallest class number but for the one that marks what does not count."""
        values = self._counted()
        return int(values.min()) if values.size else 0

    @property
    def class_count(self) -> int:
        """How many classes there are at least: names, or the largest number seen and one."""
        if self.classes:
            return len(self.classes)
        values = self._counted()
        return int(values.max()) + 1 if values.size else 0

    @property
    def seen_classes(self) -> int:
        """How many different classes there are: fewer than `class_count` where numbers between them were not seen."""
        return len(self.classes) or len(np.unique(self._counted()))

    def _counted(self) -> np.ndarray:
        if self.feature.values is None:
            return np.arange(max(1, len(self.classes)))
        values = self.feature.values
        counted: np.ndarray = values[values != IGNORED_LABEL]
        return counted

    @property
    def has_ignored(self) -> bool:
        """Whether some labels are marked as not counting."""
        return self.feature.values is not None and bool((self.feature.values == IGNORED_LABEL).any())

    @property
    def is_binary(self) -> bool:
        """Whether all values are 0 or 1."""
        if self.feature.values is None:
            return len(self.classes) == 2
        return bool(np.isin(self.feature.values, (0, 1)).all())

    def is_one_hot(self) -> bool:
        """Whether every sample has exactly one 1 among zeros."""
        values = self.feature.values
        if values is None or values.ndim != 2 or values.shape[1] < 2 or not self.is_binary:
            return False
        return bool((values.sum(axis=1) == 1).all())

    def are_distributions(self) -> bool:
        """Whether the numbers of every sample, along their last axis, are probabilities that sum to one."""
        values = self.feature.values
        if values is None or values.ndim < 2 or not values.size or values.min() < 0:
            return False
        return bool(np.allclose(values.sum(axis=-1), 1, atol=1e-3))

    def describe(self) -> str:
        """The label in a message."""
        what = f"label {self.feature.name!r} has shape {list(self.feature.shape)} per sample"
        if self.classes:
            shown = ", ".join(self.classes[:6]) + (", ..." if len(self.classes) > 6 else "")
            return f"{what} and {len(self.classes)} classes ({shown})"
        values = self.feature.values
        if values is None or not values.size:
            return what
        kind = "integers" if self.are_whole else "numbers"
        return f"{what} and {kind} from {values.min():g} to {values.max():g}"


def same_word_twice(words: Sequence[str]) -> str:
    """A hint where two classes are one, spelt in two ways."""
    seen: dict[str, str] = {}
    for word in words:
        plain = " ".join(word.casefold().split())
        if plain in seen:
            return f" {seen[plain]!r} and {word!r} differ only in capital letters or spaces: spell them alike."
        seen[plain] = word
    return ""

"""Class labels of a batch: which there are, and how many of them a mean is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward.errors import DataError

if TYPE_CHECKING:
    import numpy as np


SampleOrigin = Callable[[int], str]
"""Number of a sample in a batch -> where it comes from, in words; "" where that is unknown."""


def unknown_origin(sample: int) -> str:
    """Of a batch that somebody made."""
    return ""


@dataclass(frozen=True)
class LabelCount:
    """The labels that a mean is over.

    Attributes:
        feature: that holds them.
        ignored: label that does not count.
        class_weights: how much each class counts; None: all the same.
    """

    feature: str
    ignored: int | None = None
    class_weights: tuple[float, ...] | None = None

    @property
    def is_constant(self) -> bool:
        """Whether all samples of a shape count the same."""
        return self.ignored is None and self.class_weights is None


@dataclass(frozen=True)
class LabelRange:
    """Which class labels there are: 0 to `classes` - 1, and one that does not count.

    Attributes:
        classes: how many there are.
        ignored: label that does not count.
        blank: class that only pads (ctc).
    """

    classes: int
    ignored: int | None = None
    blank: int | None = None

    @property
    def counted(self) -> tuple[int, int]:
        """From which label to which, the end excluded, all count."""
        if self.blank is None:
            return 0, self.classes
        return (self.blank + 1, self.classes) if self.blank < self.classes // 2 else (0, self.blank)

    def check(self, name: str, labels: np.ndarray, origin: SampleOrigin = unknown_origin) -> None:
        """Checks a feature of a batch here, where its numbers still are at hand: a GPU would stop without a word.

        Raises:
            DataError: a label is out of range, with its place and how many there are.
        """
        if not labels.size or (labels.min() >= 0 and labels.max() < self.classes):
            return
        outside = (labels < 0) | (labels >= self.classes)
        if self.ignored is not None:
            outside &= labels != self.ignored
        if outside.any():
            place = tuple(int(along[0]) for along in outside.nonzero())
            ignored = "" if self.ignored is None else f" or {self.ignored}, which does not count"
            raise DataError(
                f"feature {name!r} holds the label {labels[place]}; expected 0 to {self.classes - 1}{ignored}, since "
                f"{_classes(self.classes)}. {int(outside.sum())} of the {labels.size} labels of this batch "
                f"are out of range, {first_place(place, origin)}. Fix the data, or set loss.ignore_index."
            )


def first_place(place: tuple[int, ...], origin: SampleOrigin) -> str:
    """Where the first number of a batch is that is out of range: in the batch, and where its sample comes from."""
    sample = origin(place[0])
    return f"the first at {list(place)} (sample first)" + (f", {sample}" if sample else "")


def _classes(count: int) -> str:
    if count > 1:
        return f"the model has {count} classes"
    return "the model has 1 output per sample. For labels of 0 and 1, set loss.type: binary_cross_entropy"

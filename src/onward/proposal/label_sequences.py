"""Sequences of labels without places in time, for CTC: which class is the blank, what pads them, how long they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onward.data.packing.transforms import IGNORED_LABEL
from onward.proposal.model_facts import Size

PADDING = -1


@dataclass(frozen=True)
class LabelSequences:
    """What labels `[samples, length]` say of a CTC loss.

    Attributes:
        blank: the class that is never a label.
        reason: why it is that one.
        padding: the number that pads, in addition to the blank.
        longest: time steps that the sample with the longest labels needs, a blank between equal neighbors.
    """

    blank: int
    reason: str
    padding: int
    longest: int


def read_sequences(values: np.ndarray, classes: int | None) -> LabelSequences | str:
    """The blank and the padding, or why the labels are no sequences for CTC of so many classes."""
    padding = IGNORED_LABEL if (values == IGNORED_LABEL).any() else PADDING
    labels = values[values != padding]
    lowest, highest = (int(labels.min()), int(labels.max())) if labels.size else (1, 1)
    if lowest < 0:
        return f"the smallest label is {lowest}; classes are numbered from 0, and {padding} pads at the end."
    if classes is not None and highest >= classes:
        return f"it has {classes} classes, the largest label is {highest}. Use a model with {highest + 1} or more."
    if lowest > 0 or _only_pads(values, 0, padding):
        blank, reason = 0, "class 0 is never a label."
    elif classes is None:
        blank, reason = highest + 1, f"0 is a label, {highest + 1} is none; the file leaves their number open."
    elif _only_pads(values, classes - 1, padding):
        blank, reason = classes - 1, f"class {classes - 1}, the last, is never a label."
    else:
        return f"all {classes} classes are labels, the first and the last included; CTC needs one of them as the blank."
    return LabelSequences(blank, reason, padding, _steps_needed(values, blank, padding))


def _only_pads(values: np.ndarray, blank: int, padding: int) -> bool:
    """Whether a class occurs at the ends of samples only, or nowhere."""
    pads = np.isin(values, (blank, padding))
    return bool((pads[:, 1:] >= pads[:, :-1]).all()) and not bool(pads[:, 0].all())


def _steps_needed(values: np.ndarray, blank: int, padding: int) -> int:
    counted = ~np.isin(values, (blank, padding))
    repeats = counted[:, 1:] & (values[:, 1:] == values[:, :-1])
    return int((counted.sum(axis=1) + repeats.sum(axis=1)).max(initial=0))


def is_sequence_without_places(time: Size, length: int, values: np.ndarray | None, input_sizes: Sequence[Size]) -> bool:
    """Whether labels of a length stand for a prediction of so many time steps without one for each step.

    Where the file leaves the number of steps open, labels that end in -1 or steps that no input has as a size tell;
    labels of -100 are of language models and taggers, which have one for each token.
    """
    if isinstance(time, int):
        return time != length
    if values is None or (values == IGNORED_LABEL).any():
        return False
    return time not in input_sizes or bool((values == PADDING).any())

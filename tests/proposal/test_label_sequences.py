"""Label sequences for CTC: which class is the blank, what pads, and when labels have a place for each time step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from onward.proposal.label_sequences import is_sequence_without_places, read_sequences

Rows = Sequence[Sequence[int]]


@pytest.mark.parametrize(
    ("rows", "classes", "blank", "padding", "longest"),
    [
        ([[1, 2, 2], [3, -1, -1]], 4, 0, -1, 4),
        ([[1, 2, 3], [3, 0, 0]], 4, 0, -1, 3),
        ([[0, 2, 1], [2, -1, -1]], 4, 3, -1, 3),
        ([[0, 2, 1], [2, 3, 3]], 4, 3, -1, 3),
        ([[0, 1, 1], [2, -100, -100]], 4, 3, -100, 4),
        ([[0, 1, 2]], None, 3, -1, 3),
        ([[5, 6, 7]], None, 0, -1, 3),
        ([[-1, -1]], 3, 0, -1, 0),
    ],
)
def test_the_blank_is_a_class_that_is_no_label(
    rows: Rows, classes: int | None, blank: int, padding: int, longest: int
) -> None:
    found = read_sequences(np.array(rows), classes)
    assert not isinstance(found, str)
    assert (found.blank, found.padding, found.longest) == (blank, padding, longest)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[0, 1, 2], [2, 1, 0]], "all 3 classes are labels, the first and the last included; CTC needs one of them"),
        ([[1, 3, -1]], "it has 3 classes, the largest label is 3. Use a model with 4 or more."),
        ([[1, -2, -1]], "the smallest label is -2; classes are numbered from 0, and -1 pads at the end."),
    ],
)
def test_labels_that_are_none_for_ctc_are_refused(rows: Rows, words: str) -> None:
    found = read_sequences(np.array(rows), 3)
    assert isinstance(found, str)
    assert words in found


def test_an_open_number_of_time_steps() -> None:
    """Taggers and language models have a label for each token, and mark what does not count by -100."""
    plain, padded, ignored = np.array([[1, 2]]), np.array([[1, -1]]), np.array([[1, -100]])
    assert not is_sequence_without_places("length", 2, plain, ["length"])
    assert is_sequence_without_places("length", 2, padded, ["length"])
    assert is_sequence_without_places("columns", 2, plain, ["width"])
    assert not is_sequence_without_places("logits_dim_1", 2, ignored, ["length"])
    assert is_sequence_without_places(20, 2, ignored, [])
    assert not is_sequence_without_places(2, 2, padded, [])

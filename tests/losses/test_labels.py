"""Class labels: those that count, and those out of range with their place and number."""

from __future__ import annotations

import numpy as np
import pytest

from onward.errors import DataError
from onward.losses.labels import LabelCount, LabelRange


@pytest.mark.parametrize(
    ("labels", "ignored"), [([0, 2], None), ([], None), ([-1, 1], -1), ([7, 0], 7), ([[2, -100]], -100)]
)
def test_labels_that_there_are(labels: list[int], ignored: int | None) -> None:
    LabelRange(3, ignored).check("y", np.array(labels, np.int64))


def test_labels_out_of_range() -> None:
    with pytest.raises(DataError) as caught:
        LabelRange(3, -1).check("y", np.array([[0, -1], [3, -2]]))
    assert str(caught.value) == (
        "feature 'y' holds the label 3; expected 0 to 2 or -1, which does not count, since the model has 3 classes. "
        "2 of the 4 labels of this batch are out of range, the first at [1, 0] (sample first). Fix the data, or set "
        "loss.ignore_index."
    )
    with pytest.raises(DataError, match=r"1 output per sample. For labels of 0 and 1, set loss.type: binary_cross_ent"):
        LabelRange(1).check("y", np.array([1]))


@pytest.mark.parametrize(("blank", "counted"), [(None, (0, 5)), (0, (1, 5)), (4, (0, 4)), (2, (0, 2)), (1, (2, 5))])
def test_the_larger_side_of_the_blank_counts(blank: int | None, counted: tuple[int, int]) -> None:
    assert LabelRange(5, blank=blank).counted == counted


def test_whether_all_samples_count_the_same() -> None:
    assert LabelCount("y").is_constant
    assert not LabelCount("y", ignored=0).is_constant
    assert not LabelCount("y", class_weights=(1.0, 2.0)).is_constant

"""Tables and arrays that are all there: columns become the input that has none of its own, in their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onward.data.sources.columns import arrays_of_frame, arrays_of_parts, column_names, is_frame
from onward.data.sources.naming import FeatureNames
from onward.errors import DataError

NAMES = FeatureNames({"x": 2})


class Frame(dict[str, Any]):
    """A table as pandas has it: columns by name, and no Mapping."""

    @property
    def columns(self) -> list[str]:
        return list(self)


def frame(**columns: Any) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(columns)


def test_other_columns_form_the_one_input() -> None:
    table = frame(b=[1, 2], label=[0, 1], a=[0.5, 0.25])
    assert is_frame(table)
    features, notes = arrays_of_frame(table, NAMES)
    assert features["x"].tolist() == [[1, 0.5], [2, 0.25]]
    assert features["label"].tolist() == [0, 1]
    assert notes == ["columns b, a form the input 'x', in this order."]


def test_a_table_that_has_the_input_is_taken_as_it_is() -> None:
    features, notes = arrays_of_frame(frame(x=[[1, 2], [3, 4]], label=[0, 1], name=["a", "b"]), NAMES)
    assert features["x"].tolist() == [[1, 2], [3, 4]]
    assert notes == ["features without numbers are left out: name."]


def test_columns_that_cannot_be_part_of_an_input() -> None:
    with pytest.raises(DataError, match=r"columns 'city', 'day' hold no numbers and cannot be part of the input 'x'"):
        arrays_of_frame(frame(city=["a"], day=["b"], a=[1], label=[0]), NAMES)
    with pytest.raises(DataError, match=r"column 'a' holds arrays of shape \[2\]; give it the name of a feature"):
        arrays_of_frame(frame(a=[[1, 2]], label=[0]), NAMES)


def test_a_table_and_its_labels() -> None:
    table, labels = frame(a=[1, 2], b=[3, 4]), np.array([1, 0])
    features, _ = arrays_of_parts((table, labels), NAMES)
    assert features["x"].tolist() == [[1, 3], [2, 4]]
    assert features["label"].tolist() == [1, 0]
    assert set(arrays_of_parts((table,), NAMES)[0]) == {"x"}
    with pytest.raises(DataError, match=r"a frame and 2 further elements; pass \(frame, labels\) or one frame"):
        arrays_of_parts((table, labels, labels), NAMES)


def test_lists_of_numbers_are_arrays_and_not_several_parts() -> None:
    features, _ = arrays_of_parts(([[1, 2], [3, 4]], [0, 1]), NAMES)
    assert features["x"].shape == (2, 2)
    assert features["label"].tolist() == [0, 1]
    assert arrays_of_parts(([[np.float32(1)]], [np.int64(1)]), NAMES)[0]["label"].tolist() == [1]


def test_what_is_no_table() -> None:
    assert column_names(np.zeros(2)) is None
    assert not is_frame(Frame(a=[1]))
    assert not is_frame({"columns": ["a"]})

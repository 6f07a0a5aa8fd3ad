"""Data that are all there, as one array a feature: arrays by name or in a tuple, tables of pandas, polars and Arrow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onward.data.sources.naming import FeatureNames
from onward.data.sources.values import as_array, is_numeric
from onward.errors import DataError


def is_frame(data: Any) -> bool:
    """Whether data are a table with named columns: of pandas, polars or Arrow."""
    return not isinstance(data, Mapping) and column_names(data) is not None and hasattr(data, "__getitem__")


def arrays_of_frame(data: Any, names: FeatureNames) -> tuple[dict[str, np.ndarray], list[str]]:
    """The features of a table by name, and what the user should know.

    Columns that are no feature by their name make the one input that has no column of its own, side by side in the
    order of the table.

    Raises:
        DataError: columns hold no numbers, or do not make the input.
    """
    listed = column_names(data) or []
    columns = names.of_item({str(name): data[name] for name in listed})
    lacking = [name for name in names.inputs if name not in columns]
    spare = [name for name in columns if name not in names.all]
    if len(lacking) != 1 or not spare:
        return _numbers(columns, names)
    words = [name for name in spare if not is_numeric(columns[name])]
    if words:
        raise DataError(
            f"columns {', '.join(map(repr, words))} hold no numbers and cannot be part of the input {lacking[0]!r}. "
            "Convert them to numbers, or leave them out: input_name_map={'column': ''}."
        )
    joined = np.stack([_flat_column(columns[name], name) for name in spare], axis=1)
    kept = {name: value for name, value in columns.items() if name not in spare}
    features, notes = _numbers(kept, names)
    said = f"columns {', '.join(spare)} form the input {lacking[0]!r}, in this order."
    return {lacking[0]: joined, **features}, [said, *notes]


def arrays_of_parts(data: Any, names: FeatureNames) -> tuple[dict[str, np.ndarray], list[str]]:
    """The features of a dictionary, a tuple or one array, and what the user should know.

    Raises:
        DataError: what the model or the loss reads holds no numbers, or there are more parts than names.
    """
    if isinstance(data, tuple) and data and is_frame(data[0]):
        if len(data) > 2:
            raise DataError(
                f"the data are a frame and {len(data) - 1} further elements; pass (frame, labels) or one frame."
            )
        features, notes = arrays_of_frame(data[0], replace(names, labels=()))
        labels = names.labels[:1] if len(data) > 1 else ()
        return {**features, **{name: as_array(data[1], name) for name in labels}}, notes
    if isinstance(data, tuple):
        data = tuple(as_array(part, "") if _is_list_of_numbers(part) else part for part in data)
    return _numbers(names.of_item(data), names)


def _is_list_of_numbers(part: Any) -> bool:
    """Whether a part is a list, or lists in a list, of numbers: one array, not several parts."""
    while isinstance(part, list) and part:
        part = part[0]
    return isinstance(part, int | float | np.number)


def _numbers(features: Mapping[str, Any], names: FeatureNames) -> tuple[dict[str, np.ndarray], list[str]]:
    left_out: set[str] = set()
    arrays = names.arrays(features, left_out)
    said = [f"features without numbers are left out: {', '.join(sorted(left_out))}."] if left_out else []
    return arrays, said


def _flat_column(column: Any, name: str) -> np.ndarray:
    array = as_array(column, name)
    if array.ndim != 1:
        raise DataError(
            f"column {name!r} holds arrays of shape {list(array.shape[1:])}; give it the name of a feature: "
            f"input_name_map={{{name!r}: 'name in the model'}}, or leave it out."
        )
    return array


def column_names(data: Any) -> list[Any] | None:
    """The names of a table's columns; None: it has none, or is no table."""
    for attribute in ("column_names", "columns"):
        found = getattr(data, attribute, None)
        if found is not None and not callable(found) and not hasattr(data, "with_format"):
            return list(found) if all(isinstance(name, str | int) for name in found) else None
    return None

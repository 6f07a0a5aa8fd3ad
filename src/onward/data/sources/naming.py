"""Which feature is which: the items of a data set, mappings, tuples or single arrays, under the names of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onward.data.sources.values import as_array, is_numeric, rank_of
from onward.errors import DataError


@dataclass(frozen=True)
class FeatureNames:
    """What features a model and its loss read.

    Attributes:
        inputs: inputs of the model in its order -> their rank, batch axis included; None: unknown.
        labels: features that the loss reads and that are no inputs, in its order.
        renamed: name in the data -> name here; "" leaves a feature out.
    """

    inputs: Mapping[str, int | None]
    labels: tuple[str, ...] = ("label",)
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> tuple[str, ...]:
        """Inputs, then labels."""
        return (*self.inputs, *self.labels)

    def of_item(self, item: Any) -> dict[str, Any]:
        """The features of a sample or batch by name: of a mapping, of a tuple in the order of `all`, or of one array.

        Raises:
            DataError: a tuple has more parts than there are names.
        """
        if isinstance(item, Mapping):
            named = {self.renamed.get(str(name), str(name)): value for name, value in item.items()}
            return {name: value for name, value in named.items() if name}
        parts = list(_parts(item))
        if parts and isinstance(parts[0], Mapping):
            named = self.of_item(parts[0])
            parts, names = parts[1:], tuple(name for name in self.labels if name not in named)
        else:
            named, names = {}, self.all
        if len(parts) > len(names):
            listed = ", ".join(map(repr, names)) or "none"
            raise DataError(
                f"the data have {len(parts)} parts, but names for {len(names)}: {listed} (the inputs of the model in "
                "its order, then what the loss compares with). Pass dictionaries with names."
            )
        return {**named, **dict(zip(names, parts, strict=False))}

    def is_batch(self, item: Any) -> bool | None:
        """Whether an item is a batch, not a sample, by the rank of the model's inputs; None: that is not known."""
        features = self.of_item(item)
        for name, rank in self.inputs.items():
            if rank is not None and name in features:
                found = rank_of(features[name])
                if found in (rank, rank - 1):
                    return found == rank
        return None

    def arrays(self, features: Mapping[str, Any], left_out: set[str] | None = None) -> dict[str, Any]:
        """Features as arrays; further ones that hold no numbers are left out, their names go to `left_out`.

        Raises:
            DataError: a feature that the model or the loss reads holds no numbers.
        """
        found = {}
        for name, value in features.items():
            if name in self.all or is_numeric(value):
                found[name] = as_array(value, name)
            elif left_out is not None:
                left_out.add(name)
        return found


def _parts(item: Any) -> Iterable[Any]:
    """The parts of a tuple or list, nested ones as they come; an array is one part."""
    if not isinstance(item, tuple | list):
        yield item
        return
    for part in item:
        if isinstance(part, tuple | list) and part and not isinstance(part[0], int | float | bool | str | np.generic):
            yield from _parts(part)
        else:
            yield part

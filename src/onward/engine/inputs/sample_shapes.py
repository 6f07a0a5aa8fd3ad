"""The shape of a sample of the data fitted to that of the model's input: only axes of size 1 may differ.

A number per sample is stored as [N], [N, 1] or [N, 1, 1], by packing always as [N]; a model's input is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations


def fit_sample_shape(found: Sequence[int], expected: Sequence[int | str]) -> tuple[int, ...] | None:
    """The shape of the same elements in the same order that an input takes; None: there is none, or more than one.

    Args:
        found: of a sample of the data.
        expected: of a sample of the input; an axis with a name takes any size.
    """
    if len(found) == len(expected) and all(map(_agree, found, expected)):
        return tuple(found)
    sizes = [size for size in found if size != 1]
    fitting = [
        shape
        for places in combinations(range(len(expected)), len(sizes))
        if all(map(_agree, shape := _spread(sizes, places, len(expected)), expected))
    ]
    return fitting[0] if len(fitting) == 1 else None


def _agree(size: int, expected: int | str) -> bool:
    return isinstance(expected, str) or size == expected


def _spread(sizes: Sequence[int], places: Sequence[int], rank: int) -> tuple[int, ...]:
    """`sizes` at `places` of a shape, 1 elsewhere."""
    taken = dict(zip(places, sizes, strict=True))
    return tuple(taken.get(axis, 1) for axis in range(rank))

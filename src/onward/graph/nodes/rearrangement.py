"""How one stored tensor was made of another by moving its elements: permuted, repeated, sliced or reordered.

The answer is found by comparing the numbers themselves; nothing here knows where the tensors come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

LARGEST_ORIGINAL = 2**22
"""Elements of the largest tensor in which the places of another's elements are searched."""

_LARGEST_RANK = 4
_STARTS = 1024
_STRETCHES, _STRETCH = 4, 1024
"""How many stretches of how many elements tell whether a tensor of more than `LARGEST_ORIGINAL` holds one number."""


@dataclass(frozen=True)
class Rearrangement:
    """`tensor.transpose(permutation)`, broadcast to `shape` if given; or the `elements` of the flat tensor, in `shape`.

    Attributes:
        permutation: of the axes; as they are where `elements` is given.
        shape: of the result, where it is not that of the permuted tensor.
        elements: index into the flat tensor for every element of the result.
    """

    permutation: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    elements: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def is_identity(self) -> bool:
        """Whether the tensor is left as it is."""
        return self.shape is None and self.permutation == tuple(range(len(self.permutation)))

    def shape_of(self, original: Sequence[int]) -> tuple[int, ...]:
        """The shape that a tensor of the shape `original` becomes."""
        return tuple(original[axis] for axis in self.permutation) if self.shape is None else self.shape


def find_rearrangement(copy: np.ndarray, original: np.ndarray) -> Rearrangement | None:
    """How `copy` was made of `original`, or None if its numbers do not say so.

    Tensors filled with one number say nothing. Of several possible ways the simplest is found: the identity, then a
    permutation of the axes, a repetition, another order of the elements; the last only where each element of the copy
    has one place in the original.
    """
    if copy.dtype != original.dtype or copy.size < 2 or not _varies(copy):
        return None
    return find_permutation(copy, original) or _repetition(copy, original) or _order(copy, original)


def is_equal(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays have the same shape and bits."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.ndim == 0:
        return left.tobytes() == right.tobytes()
    # The first row decides nearly always, without reading the rest.
    return np.array_equal(left[0], right[0]) and np.array_equal(left, right)


def _varies(array: np.ndarray) -> bool:
    """Whether a tensor holds more than one number; of a large one stretches decide, without reading the rest."""
    flat = array.reshape(-1)
    if flat.size > LARGEST_ORIGINAL:
        starts = np.linspace(0, flat.size - _STRETCH, _STRETCHES).astype(np.int64)
        flat = np.concatenate([flat[start : start + _STRETCH] for start in starts])
    return bool(flat[0] != flat[-1]) or bool((flat != flat[0]).any())


def find_permutation(copy: np.ndarray, original: np.ndarray) -> Rearrangement | None:
    """The permutation of the axes by which `copy` was made of `original`; first rows decide nearly always."""
    if sorted(copy.shape) != sorted(original.shape) or copy.ndim > _LARGEST_RANK:
        return None
    if copy.size and copy.item(0) != original.item(0):
        return None  # no permutation of the axes moves the first element
    for permutation in itertools.permutations(range(original.ndim)):
        if is_equal(copy, original.transpose(permutation)):
            return Rearrangement(permutation)
    return None


def _repetition(copy: np.ndarray, original: np.ndarray) -> Rearrangement | None:
    axes = zip(reversed(copy.shape), reversed(original.shape), strict=False)
    if original.ndim > copy.ndim or any(small not in (1, large) for large, small in axes):
        return None
    repeated = np.broadcast_to(original, copy.shape)
    # The first row decides nearly always, without reading the rest.
    if not (np.atleast_1d(copy)[:1] == np.atleast_1d(repeated)[:1]).all() or not (copy == repeated).all():
        return None
    return Rearrangement(tuple(range(original.ndim)), copy.shape)


def _order(copy: np.ndarray, original: np.ndarray) -> Rearrangement | None:
    if original.size > LARGEST_ORIGINAL or copy.size > LARGEST_ORIGINAL:
        return None
    wanted, given = _bits(copy), _bits(original)
    if wanted.size == given.size and np.array_equal(wanted, given):
        return Rearrangement(tuple(range(original.ndim)), copy.shape, np.arange(given.size))
    if not np.isin(wanted[:8], given).all():
        return None
    order = np.argsort(given, kind="stable")
    ascending = given[order]
    left = np.searchsorted(ascending, wanted, side="left")
    right = np.searchsorted(ascending, wanted, side="right")
    once = right - left == 1
    if not once.all():
        places = np.flatnonzero(once)
        box = _box(copy, original, int(places[0]), int(order[left[places[0]]])) if places.size else None
        return box or _stretch(copy, original, wanted, given)
    return Rearrangement(tuple(range(original.ndim)), copy.shape, order[left])


def _box(copy: np.ndarray, original: np.ndarray, place: int, found: int) -> Rearrangement | None:
    """A slice along the axes, which may be permuted: `place` of the flat copy is `found` of the flat original."""
    if copy.ndim != original.ndim or copy.ndim > _LARGEST_RANK:
        return None
    inside, outside = np.unravel_index(place, copy.shape), np.unravel_index(found, original.shape)
    flat = np.arange(original.size).reshape(original.shape)
    for permutation in itertools.permutations(range(original.ndim)):
        begins = [int(outside[axis]) - int(inside[i]) for i, axis in enumerate(permutation)]
        ends = [begin + size for begin, size in zip(begins, copy.shape, strict=True)]
        if min(begins) < 0 or any(end > original.shape[axis] for end, axis in zip(ends, permutation, strict=True)):
            continue
        box = tuple(slice(begin, end) for begin, end in zip(begins, ends, strict=True))
        if is_equal(copy, original.transpose(permutation)[box]):
            elements = flat.transpose(permutation)[box].reshape(-1)
            return Rearrangement(tuple(range(original.ndim)), copy.shape, elements)
    return None


def _stretch(copy: np.ndarray, original: np.ndarray, wanted: np.ndarray, given: np.ndarray) -> Rearrangement | None:
    """A stretch of the flat tensor, where numbers that occur twice leave the place of single elements open."""
    starts = np.flatnonzero(given[: max(0, given.size - wanted.size + 1)] == wanted[0])
    fitting = [start for start in starts[:_STARTS] if np.array_equal(given[start : start + wanted.size], wanted)]
    if len(fitting) != 1:
        return None
    elements = np.arange(fitting[0], fitting[0] + wanted.size)
    return Rearrangement(tuple(range(original.ndim)), copy.shape, elements)


def _bits(array: np.ndarray) -> np.ndarray:
    """The elements as whole numbers, which can be sorted and searched whatever the element type."""
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")

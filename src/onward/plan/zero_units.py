"""Units of ZeRO: which segments' weights are gathered, and whose gradients are sharded, in one collective.

A unit is a block of the network, as people wrap it by hand: the layer that repeats, however many segments it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_BYTES = 2**20
"""A collective of less takes about as long as one of this size."""
MOST_PARTS = 8
"""A network of few bytes is cut all the same: units need not hold more than one of so many parts of its weights."""


@dataclass(frozen=True, order=True)
class HeldWeight:
    """A weight that only one segment reads, as this rank has it: sizes and name of the ONNX element type."""

    shape: tuple[int, ...]
    element_type: str

    @property
    def nbytes(self) -> int:
        """Of its fp32 master; float64 weights stay what they are."""
        return math.prod(self.shape) * (8 if self.element_type == "DOUBLE" else 4)


@dataclass(frozen=True)
class ZeroUnit:
    """Segments whose weights are communicated together.

    Attributes:
        segments: consecutive, ascending.
        nbytes: of their weights, on one rank if nothing were sharded.
        is_kept: its weights stay between forward and backward pass, since the backward pass begins with them at once.
    """

    segments: tuple[int, ...]
    nbytes: int
    is_kept: bool


def choose_units(segments: Sequence[Sequence[HeldWeight]], backward_follows: bool) -> tuple[ZeroUnit, ...]:
    """The units of a chain of segments, ascending.

    Blocks that repeat are units, several of them where one is small; what is around them is merged until it is
    large enough. What is left stays with the weights that several segments read, and so do weights that are single
    numbers.

    Args:
        segments: the weights that only this segment reads, for each.
        backward_follows: whether the backward pass begins at once when the last segment is done.
    """
    held = [tuple(sorted(weight for weight in segment if weight.shape)) for segment in segments]
    sizes = [sum(weight.nbytes for weight in segment) for segment in held]
    if len({weight.element_type == "DOUBLE" for segment in held for weight in segment}) > 1:
        groups = [[index] for index, size in enumerate(sizes) if size]  # weights of two types cannot travel together
    else:
        groups = _groups(held, sizes, min(LEAST_BYTES, sum(sizes) // MOST_PARTS))
    last = len(segments) - 1
    return tuple(
        ZeroUnit(_trimmed(group, sizes), sum(sizes[index] for index in group), backward_follows and last in group)
        for group in groups
    )


def find_rows(segments: Sequence[Sequence[HeldWeight]]) -> list[tuple[int, int, int]]:
    """(first segment, segments of a block, blocks) of whatever comes several times in a row, ascending."""
    held = [tuple(sorted(segment)) for segment in segments]
    sizes = [sum(weight.nbytes for weight in segment) for segment in held]
    return _repeats(held, sizes, 0, len(held))


def _trimmed(group: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Without the segments at either end that need no gathered weight."""
    wanted = [index for index in group if sizes[index]]
    return tuple(range(wanted[0], wanted[-1] + 1))


def _groups(held: Sequence[tuple[HeldWeight, ...]], sizes: Sequence[int], least: int) -> list[list[int]]:
    groups, begin = list[list[int]](), 0
    for start, period, count in _repeats(held, sizes, 0, len(held)):
        groups += _merged(range(begin, start), sizes, least)
        begin = start + period * count
        block = sum(sizes[start : start + period])
        step = period * max(1, -(-least // block))
        groups += [list(range(first, min(first + step, begin))) for first in range(start, begin, step)]
    return groups + _merged(range(begin, len(held)), sizes, least)


def _merged(segments: range, sizes: Sequence[int], least: int) -> list[list[int]]:
    """Segments that are no repeated blocks, put together; the last that are too small join those before."""
    groups, open_group = list[list[int]](), list[int]()
    for index in segments:
        open_group.append(index)
        if sum(sizes[i] for i in open_group) > max(least - 1, 0):
            groups.append(open_group)
            open_group = []
    if groups:
        groups[-1] += open_group
    return groups


def _repeats(
    held: Sequence[tuple[HeldWeight, ...]], sizes: Sequence[int], start: int, stop: int
) -> list[tuple[int, int, int]]:
    """(first segment, segments of a block, blocks), ascending, of whatever comes several times in a row.

    Of all choices the one that covers most bytes; of these the shortest block, where its row ends, and the last such
    row. Then the same on both sides.
    """
    best, covered = None, 0
    for period in range(1, (stop - start) // 2 + 1):
        run = 0
        for index in range(start, stop - period + 1):
            if index < stop - period and held[index] == held[index + period]:
                run += 1
                continue
            if run >= period:
                count = run // period + 1
                first = index + period * (1 - count)  # a layer ends with what it hands on, as with a norm
                size = sum(sizes[first : first + period * count])
                if size > covered or (best is not None and (size, period) == (covered, best[1])):
                    best, covered = (first, period, count), size
            run = 0
    if best is None:
        return []
    first, period, count = best
    return [
        *_repeats(held, sizes, start, first),
        best,
        *_repeats(held, sizes, first + period * count, stop),
    ]

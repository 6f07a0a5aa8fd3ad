"""Which part of a weight a horizontal rank holds, as boxes of the whole tensor and of the rank's own.

A weight is cut along one axis. The axis may be made of blocks that are cut one by one (the queries, keys and values of
a fused projection), so that a rank's part is one box for each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Box:
    """A part of a whole tensor and where it lies in the tensor of the rank that holds it.

    Attributes:
        whole_offsets: first element along each axis, in the whole tensor.
        sizes: elements along each axis.
        local_offsets: first element along each axis, in the rank's tensor.
    """

    whole_offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]

    @property
    def whole_slices(self) -> tuple[slice, ...]:
        """The index of this box in the whole tensor."""
        return _slices(self.whole_offsets, self.sizes)

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """The index of this box in the rank's tensor."""
        return _slices(self.local_offsets, self.sizes)


@dataclass(frozen=True)
class WeightShard:
    """How a weight is cut: along `axis`, which is made of `blocks`, each of them shared by all ranks.

    Attributes:
        axis: counted from the front.
        blocks: sizes that add up to the whole axis. Of a block of size n, rank r of R holds the elements from
            n * r // R up to n * (r + 1) // R: equal parts wherever R divides n.
    """

    axis: int
    blocks: tuple[int, ...]

    def local_size(self, rank: int, size: int) -> int:
        """How many elements of the axis a rank holds."""
        return sum(end - start for start, end in (part_of(block, rank, size) for block in self.blocks))

    def local_shape(self, whole_shape: Sequence[int], rank: int, size: int) -> tuple[int, ...]:
        """The shape of a rank's tensor."""
        self._check(whole_shape)
        return (*whole_shape[: self.axis], self.local_size(rank, size), *whole_shape[self.axis + 1 :])

    def boxes(self, whole_shape: Sequence[int], rank: int, size: int) -> tuple[Box, ...]:
        """The parts of the whole tensor that a rank holds, in the order in which its own tensor has them.

        Raises:
            ValueError: the blocks do not add up to the axis, or there is no such rank.
        """
        self._check(whole_shape)
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size} ranks.")
        found, whole, local = [], 0, 0
        for block in self.blocks:
            start, end = part_of(block, rank, size)
            if end > start:
                found.append(_box(whole_shape, self.axis, whole + start, end - start, local))
            whole, local = whole + block, local + end - start
        return tuple(found)

    def _check(self, whole_shape: Sequence[int]) -> None:
        if not 0 <= self.axis < len(whole_shape) or sum(self.blocks) != whole_shape[self.axis]:
            raise ValueError(f"blocks {list(self.blocks)} of axis {self.axis} do not make up {list(whole_shape)}.")


def part_of(block: int, rank: int, size: int) -> tuple[int, int]:
    """The first element of a block that a rank holds, and the one after its last."""
    return block * rank // size, block * (rank + 1) // size


def cut(boxes: Sequence[Box], start: int, stop: int) -> tuple[Box, ...]:
    """The boxes of a tensor made of the rows [start, stop) of a rank's own, as ZeRO cuts it further along axis 0.

    Args:
        boxes: what the rank's own tensor is made of.
        start, stop: rows of the rank's own tensor; nothing where stop is not above start.
    """
    found = []
    for box in boxes:
        first = max(start, box.local_offsets[0])
        length = min(stop, box.local_offsets[0] + box.sizes[0]) - first
        if length > 0:
            found.append(
                Box(
                    (box.whole_offsets[0] + first - box.local_offsets[0], *box.whole_offsets[1:]),
                    (length, *box.sizes[1:]),
                    (first - start, *box.local_offsets[1:]),
                )
            )
    return tuple(found)


def take_part(whole: NDArray[np.generic], shard: WeightShard | None, rank: int, size: int) -> NDArray[np.generic]:
    """A rank's part of a whole array; the array itself where nothing is cut (`shard` None). Copies only the part."""
    if shard is None:
        return whole
    boxes = shard.boxes(whole.shape, rank, size)
    parts = [whole[box.whole_slices] for box in boxes]
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])
    if not parts:
        return np.empty(shard.local_shape(whole.shape, rank, size), whole.dtype)
    return np.concatenate(parts, axis=shard.axis)


def join_parts(parts: Sequence[NDArray[np.generic]], shard: WeightShard | None) -> NDArray[np.generic]:
    """The whole array from the arrays of all ranks, in the order of ranks.

    Raises:
        ValueError: a part has not the shape that the shard gives its rank.
    """
    ordered = list(parts)
    if shard is None:
        return ordered[0]
    whole_shape = list(ordered[0].shape)
    whole_shape[shard.axis] = sum(shard.blocks)
    whole = np.empty(whole_shape, ordered[0].dtype)
    for rank, part in enumerate(ordered):
        expected = shard.local_shape(whole_shape, rank, len(ordered))
        if part.shape != expected:
            raise ValueError(f"rank {rank} holds {list(part.shape)}; expected {list(expected)}.")
        for box in shard.boxes(whole_shape, rank, len(ordered)):
            whole[box.whole_slices] = part[box.local_slices]
    return whole


def _box(whole_shape: Sequence[int], axis: int, start: int, length: int, local: int) -> Box:
    zeros = (0,) * len(whole_shape)
    return Box(
        (*zeros[:axis], start, *zeros[axis + 1 :]),
        (*whole_shape[:axis], length, *whole_shape[axis + 1 :]),
        (*zeros[:axis], local, *zeros[axis + 1 :]),
    )


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))

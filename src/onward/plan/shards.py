"""Which shards of a weight a tensor-parallel rank holds: where they are in the full tensor and in the rank's own.

A weight is sharded along one axis. The axis may consist of blocks that are sharded one by one (the queries, keys and
values of a fused projection), so that a rank holds one shard of each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TensorShard:
    """A rectangular slice of a full tensor, and where it is stored in the tensor of the rank that holds it.

    Attributes:
        offsets: first element along each axis, in the full tensor.
        sizes: elements along each axis.
        local_offsets: first element along each axis, in the rank's tensor.
        replica: which this rank is of the tensor-parallel ranks in succession that hold these elements, and how many
            they are; the first one counts them.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    replica: tuple[int, int] = (0, 1)

    @property
    def is_counted(self) -> bool:
        """Whether no tensor-parallel rank before this one holds the same elements."""
        return self.replica[0] == 0

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this shard in the full tensor."""
        return _slices(self.offsets, self.sizes)

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """The index of this shard in the rank's tensor."""
        return _slices(self.local_offsets, self.sizes)


@dataclass(frozen=True)
class Sharding:
    """How a tensor is sharded: along `axis`, which consists of `blocks`, each of them divided among all ranks.

    Attributes:
        axis: counted from the front.
        blocks: sizes that add up to the axis. Of a block of size n, rank r of R holds the elements from
            n * r // R up to n * (r + 1) // R: equal shards wherever R divides n.
        parts: for each block, into how many shards it can be divided at most, as there are heads of keys and values;
            where R is a multiple of them, R / parts ranks in succession hold the same shard. 0: any number.
    """

    axis: int
    blocks: tuple[int, ...]
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Blocks without a limit have no parts."""
        if not any(self.parts):
            object.__setattr__(self, "parts", ())

    @property
    def limits(self) -> tuple[int, ...]:
        """`parts`, an entry for every block."""
        return self.parts or (0,) * len(self.blocks)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of it."""
        return bool(self.parts) and set(self.parts) == {1}

    def has_limits_of(self, other: Sharding) -> bool:
        """Whether each block that the other divides into so many parts at most is divided into as many here."""
        return all(own == limit or not limit for own, limit in zip(self.limits, other.limits, strict=True))

    def copies(self, size: int) -> tuple[int, ...]:
        """For each block, how many ranks hold the same shard."""
        return tuple(size // most if most and size % most == 0 else 1 for most in self.limits)

    def ranges(self, rank: int, size: int) -> list[tuple[int, int]]:
        """Of each block, the first element that a rank holds, and the one after its last."""
        return [
            range_of_rank(block, rank // copies, size // copies)
            for block, copies in zip(self.blocks, self.copies(size), strict=True)
        ]

    def local_size(self, rank: int, size: int) -> int:
        """How many elements of the axis a rank holds."""
        return sum(end - start for start, end in self.ranges(rank, size))

    def local_shape(self, full_shape: Sequence[int], rank: int, size: int) -> tuple[int, ...]:
        """The shape of a rank's tensor."""
        self._check(full_shape)
        return (*full_shape[: self.axis], self.local_size(rank, size), *full_shape[self.axis + 1 :])

    def shards(self, full_shape: Sequence[int], rank: int, size: int) -> tuple[TensorShard, ...]:
        """The shards of the full tensor that a rank holds, in the order in which its own tensor has them.

        Raises:
            ValueError: the blocks do not add up to the axis, or there is no such rank.
        """
        self._check(full_shape)
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size} ranks.")
        found, offset, local = [], 0, 0
        for block, copies, (start, end) in zip(self.blocks, self.copies(size), self.ranges(rank, size), strict=True):
            if end > start:
                shard = _shard_along(full_shape, self.axis, offset + start, end - start, local)
                found.append(replace(shard, replica=(rank % copies, copies)))
            offset, local = offset + block, local + end - start
        return tuple(found)

    def _check(self, full_shape: Sequence[int]) -> None:
        if not 0 <= self.axis < len(full_shape) or sum(self.blocks) != full_shape[self.axis]:
            raise ValueError(f"blocks {list(self.blocks)} of axis {self.axis} do not make up {list(full_shape)}.")


def range_of_rank(block: int, rank: int, size: int) -> tuple[int, int]:
    """The first element of a block that a rank holds, and the one after its last."""
    return block * rank // size, block * (rank + 1) // size


def cut(shards: Sequence[TensorShard], start: int, stop: int) -> tuple[TensorShard, ...]:
    """The shards of a tensor made of the rows [start, stop) of a rank's own, as ZeRO shards it further along axis 0.

    Args:
        shards: what the rank's own tensor is made of.
        start, stop: rows of the rank's own tensor; nothing where stop is not above start.
    """
    found = []
    for shard in shards:
        first = max(start, shard.local_offsets[0])
        length = min(stop, shard.local_offsets[0] + shard.sizes[0]) - first
        if length > 0:
            found.append(
                replace(
                    shard,
                    offsets=(shard.offsets[0] + first - shard.local_offsets[0], *shard.offsets[1:]),
                    sizes=(length, *shard.sizes[1:]),
                    local_offsets=(first - start, *shard.local_offsets[1:]),
                )
            )
    return tuple(found)


def take_shard(full: NDArray[np.generic], sharding: Sharding | None, rank: int, size: int) -> NDArray[np.generic]:
    """A rank's shards of an array as one array; the array itself without a sharding. Copies nothing else."""
    if sharding is None:
        return full
    shards = sharding.shards(full.shape, rank, size)
    arrays = [full[shard.slices] for shard in shards]
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0])
    if not arrays:
        return np.empty(sharding.local_shape(full.shape, rank, size), full.dtype)
    return np.concatenate(arrays, axis=sharding.axis)


def _shard_along(full_shape: Sequence[int], axis: int, start: int, length: int, local: int) -> TensorShard:
    zeros = (0,) * len(full_shape)
    return TensorShard(
        (*zeros[:axis], start, *zeros[axis + 1 :]),
        (*full_shape[:axis], length, *full_shape[axis + 1 :]),
        (*zeros[:axis], local, *zeros[axis + 1 :]),
    )


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))

"""Which shards of a weight a tensor-parallel rank holds: where they are in the full tensor and in the rank's own.

A weight is sharded along one axis. The axis may consist of blocks that are sharded one by one (the queries, keys and
values of a fused projection), so that a rank holds one shard of each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TensorShard:
    """A rectangular slice of a full tensor, and where it is stored in the tensor of the rank that holds it.

    Attributes:
        offsets: first element along each axis, in the full tensor.
        sizes: elements along each axis.
        local_offsets: first element along each axis, in the rank's tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]

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
    """

    axis: int
    blocks: tuple[int, ...]

    def local_size(self, rank: int, size: int) -> int:
        """How many elements of the axis a rank holds."""
        return sum(end - start for start, end in (range_of_rank(block, rank, size) for block in self.blocks))

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
        for block in self.blocks:
            start, end = range_of_rank(block, rank, size)
            if end > start:
                found.append(_shard_along(full_shape, self.axis, offset + start, end - start, local))
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
                TensorShard(
                    (shard.offsets[0] + first - shard.local_offsets[0], *shard.offsets[1:]),
                    (length, *shard.sizes[1:]),
                    (first - start, *shard.local_offsets[1:]),
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


def join_shards(arrays: Sequence[NDArray[np.generic]], sharding: Sharding | None) -> NDArray[np.generic]:
    """The full array from the arrays of all ranks, in the order of ranks.

    Raises:
        ValueError: an array has not the shape that the sharding gives its rank.
    """
    ordered = list(arrays)
    if sharding is None:
        return ordered[0]
    full_shape = list(ordered[0].shape)
    full_shape[sharding.axis] = sum(sharding.blocks)
    full = np.empty(full_shape, ordered[0].dtype)
    for rank, array in enumerate(ordered):
        expected = sharding.local_shape(full_shape, rank, len(ordered))
        if array.shape != expected:
            raise ValueError(f"rank {rank} holds {list(array.shape)}; expected {list(expected)}.")
        for shard in sharding.shards(full_shape, rank, len(ordered)):
            full[shard.slices] = array[shard.local_slices]
    return full


def _shard_along(full_shape: Sequence[int], axis: int, start: int, length: int, local: int) -> TensorShard:
    zeros = (0,) * len(full_shape)
    return TensorShard(
        (*zeros[:axis], start, *zeros[axis + 1 :]),
        (*full_shape[:axis], length, *full_shape[axis + 1 :]),
        (*zeros[:axis], local, *zeros[axis + 1 :]),
    )


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))

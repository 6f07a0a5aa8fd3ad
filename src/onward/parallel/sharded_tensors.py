"""What one rank holds of a tensor of the run, and where in the full tensor it belongs. Saving and loading see a run of
any layout as a mapping from names to sharded tensors; in a run of one process each is one shard, the full tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from onward.plan.shards import TensorShard


@dataclass(frozen=True)
class ShardedTensor:
    """A rank's shards of a tensor.

    Attributes:
        tensor: the rank's own, a plain tensor on any device; read from and written to in place.
        full_shape: of the full tensor, which all ranks hold between them.
        shards: which elements of the full tensor these are; empty where a rank holds nothing of it.
        is_written: False where another rank writes the same shards into a checkpoint.
    """

    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    shards: tuple[TensorShard, ...]
    is_written: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError where a shard is not inside the tensors."""
        local_shape = tuple(self.tensor.shape)
        for shard in self.shards:
            if not _is_inside(shard.offsets, shard.sizes, self.full_shape):
                raise ValueError(f"{shard} is not inside a tensor of shape {list(self.full_shape)}")
            if not _is_inside(shard.local_offsets, shard.sizes, local_shape):
                raise ValueError(f"{shard} is not inside a rank's tensor of shape {list(local_shape)}")

    @staticmethod
    def full(tensor: torch.Tensor, is_written: bool = True) -> ShardedTensor:
        """Of a rank that holds a full tensor, as one shard."""
        shape = tuple(tensor.shape)
        zeros = (0,) * len(shape)
        return ShardedTensor(tensor, shape, (TensorShard(zeros, shape, zeros),), is_written)

    @property
    def num_elements(self) -> int:
        """Elements of all shards."""
        return sum(math.prod(shard.sizes) for shard in self.shards)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`, for files and messages."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """`float32` -> `torch.float32`.

    Raises:
        ValueError: torch has no such type.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of elements; expected a name such as float32")
    return dtype


def _is_inside(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if not len(offsets) == len(sizes) == len(shape):
        return False
    return all(start >= 0 and start + length <= size for start, length, size in zip(offsets, sizes, shape, strict=True))

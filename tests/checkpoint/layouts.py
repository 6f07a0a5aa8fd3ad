"""Layouts of a run for the tests: which shards of a few tensors each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from onward.parallel.sharded_tensors import ShardedTensor
from onward.plan.shards import Sharding, TensorShard, cut

Layout = Callable[[int], dict[str, ShardedTensor]]
"""From a rank to its sharded tensors, filled with the values of `full_tensors`."""


def full_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of several ranks, types and sizes, one of them empty and one named like a numbered key of another."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights/fc": torch.randn(10, 6, generator=generator),
        "weights/qkv": torch.randn(4, 12, generator=generator),
        "weights/qkv#0": torch.randn(3, generator=generator),
        "weights/bias": torch.randn(7, generator=generator).double(),
        "weights/conv": torch.randn(6, 4, 3, generator=generator).bfloat16(),
        "slots/exp_avg/fc": torch.randn(10, 6, generator=generator),
        "slots/step/fc": torch.tensor(float(seed)),
        "states/empty": torch.empty(0, 3),
        "states/mask": torch.rand(5, generator=generator) > 0.5,
    }


def sharded_like(
    whole: torch.Tensor, shards: tuple[TensorShard, ...], local_shape: tuple[int, ...], written: bool = True
) -> ShardedTensor:
    """A rank's tensor of these shards, with the full tensor's values."""
    local = torch.zeros(local_shape, dtype=whole.dtype)
    for shard in shards:
        local[shard.local_slices] = whole[shard.slices]
    return ShardedTensor(local, tuple(whole.shape), shards, written)


def shard_of(whole: torch.Tensor, sharding: Sharding, rank: int, size: int) -> ShardedTensor:
    """A tensor-parallel rank's shards."""
    shape = tuple(whole.shape)
    return sharded_like(whole, sharding.shards(shape, rank, size), sharding.local_shape(shape, rank, size))


def rows_of(sharded: ShardedTensor, rank: int, size: int) -> ShardedTensor:
    """A ZeRO rank's rows of a rank's tensor: equal numbers of rows, the last ranks with fewer or none."""
    if sharded.tensor.dim() == 0 or sharded.tensor.shape[0] == 0:
        return ShardedTensor(sharded.tensor, sharded.full_shape, sharded.shards, sharded.is_written and rank == 0)
    length = sharded.tensor.shape[0]
    rows = -(-length // size)
    start, stop = min(rank * rows, length), min((rank + 1) * rows, length)
    return ShardedTensor(sharded.tensor[start:stop].clone(), sharded.full_shape, cut(sharded.shards, start, stop))


HORIZONTAL = {
    "weights/fc": Sharding(0, (4, 6)),
    "weights/qkv": Sharding(1, (4, 4, 4)),
    "slots/exp_avg/fc": Sharding(0, (4, 6)),
    "weights/conv": Sharding(1, (4,)),
}


def one(rank: int, seed: int = 0) -> dict[str, ShardedTensor]:
    """One process."""
    return {name: ShardedTensor.full(whole) for name, whole in full_tensors(seed).items()}


def rows_on_2(rank: int, seed: int = 0) -> dict[str, ShardedTensor]:
    """Every tensor cut along its first axis; what cannot be is held, and offered for writing, by both."""
    return {
        name: shard_of(whole, Sharding(0, (whole.shape[0],)), rank, 2)
        if whole.numel() > 1
        else ShardedTensor.full(whole)
        for name, whole in full_tensors(seed).items()
    }


def fused_on_2(rank: int, seed: int = 0) -> dict[str, ShardedTensor]:
    """Horizontal, with a fused projection; the rest replicated and written by rank 0."""
    return {
        name: shard_of(whole, HORIZONTAL[name], rank, 2) if name in HORIZONTAL else ShardedTensor.full(whole, rank == 0)
        for name, whole in full_tensors(seed).items()
    }


def zero_on_3(rank: int, seed: int = 0) -> dict[str, ShardedTensor]:
    """ZeRO: uneven rows, some ranks without any."""
    return {name: rows_of(ShardedTensor.full(whole), rank, 3) for name, whole in full_tensors(seed).items()}


def stages_on_3(rank: int, seed: int = 0) -> dict[str, ShardedTensor]:
    """Pipeline: other names on every rank, none on the second, one of them held by the two others."""
    tensors = full_tensors(seed)
    own: Mapping[int, list[str]] = {
        0: ["weights/fc", "weights/qkv#0", "slots/exp_avg/fc", "states/empty"],
        1: [],
        2: [name for name in tensors if name not in ("weights/qkv#0", "slots/exp_avg/fc", "states/empty")],
    }
    return {name: ShardedTensor.full(tensors[name]) for name in own[rank]}


def mixed_on_4(rank: int, seed: int = 0) -> dict[str, ShardedTensor]:
    """Two data times two horizontal: ZeRO's rows of a fused projection's share."""
    return {name: rows_of(sharded, rank // 2, 2) for name, sharded in _replicated_once(rank, seed).items()}


def _replicated_once(rank: int, seed: int) -> dict[str, ShardedTensor]:
    tensors = fused_on_2(rank % 2, seed)
    return {
        name: sharded
        if sharded.shards and sharded.is_written
        else ShardedTensor(sharded.tensor, sharded.full_shape, sharded.shards, False)
        for name, sharded in tensors.items()
    }


LAYOUTS: dict[str, tuple[int, Layout]] = {
    "one": (1, one),
    "rows on 2": (2, rows_on_2),
    "fused on 2": (2, fused_on_2),
    "zero on 3": (3, zero_on_3),
    "stages on 3": (3, stages_on_3),
    "mixed on 4": (4, mixed_on_4),
}
"""Name -> number of ranks and layout."""

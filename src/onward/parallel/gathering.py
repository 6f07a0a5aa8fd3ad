"""Gathers full tensors from the shards that ranks hold, on rank 0, in host memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from onward.parallel.launch.process import Mesh
from onward.parallel.messages import Json, all_gather_json
from onward.parallel.sharded_tensors import ShardedTensor, dtype_name, dtype_named
from onward.plan.shards import TensorShard

_Outline = tuple[tuple[int, ...], tuple[TensorShard, ...], torch.dtype]
"""Shape of a full tensor, the shards of it that a rank holds, and its type."""


def gather_full(mesh: Mesh, tensors: Mapping[str, ShardedTensor]) -> dict[str, torch.Tensor]:
    """Collects every tensor that any rank holds a shard of.

    Args:
        mesh: the ranks; all of them must call this.
        tensors: of this rank; names may differ from rank to rank.

    Returns:
        On rank 0 name -> full tensor on the CPU; elsewhere nothing.
    """
    written = {name: sharded for name, sharded in tensors.items() if sharded.is_written}
    if mesh.control is None:
        return {name: _full_of_one(sharded) for name, sharded in written.items()}
    found: dict[str, torch.Tensor] = {}
    for rank, theirs in enumerate(_outlines(mesh, written)):
        for name, (shape, shards, dtype) in theirs.items():
            for shard in shards:
                if mesh.rank == rank:
                    values = written[name].tensor.detach()[shard.local_slices].cpu().contiguous()
                    if rank:
                        dist.send(values, 0, group=mesh.control)
                elif mesh.rank == 0:
                    values = torch.empty(shard.sizes, dtype=dtype)
                    dist.recv(values, rank, group=mesh.control)
                if mesh.rank == 0:
                    found.setdefault(name, torch.empty(shape, dtype=dtype))[shard.slices] = values
    return found


def describe_full(mesh: Mesh, tensors: Mapping[str, ShardedTensor]) -> dict[str, torch.Tensor]:
    """On every rank what `gather_full` would collect, without the values: tensors of the device "meta"."""
    outlines = _outlines(mesh, {name: sharded for name, sharded in tensors.items() if sharded.is_written})
    return {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for theirs in outlines
        for name, (shape, _, dtype) in theirs.items()
    }


def _outlines(mesh: Mesh, written: Mapping[str, ShardedTensor]) -> list[dict[str, _Outline]]:
    """Of every rank: what it would write of which tensor."""
    own = {name: (p.full_shape, p.shards, p.tensor.dtype) for name, p in written.items()}
    if mesh.control is None:
        return [own]
    sent: dict[str, Json] = {
        name: [shape, [[shard.offsets, shard.sizes, shard.local_offsets] for shard in shards], dtype_name(dtype)]
        for name, (shape, shards, dtype) in own.items()
    }
    return [
        {
            name: (tuple(shape), tuple(TensorShard(*map(tuple, shard)) for shard in shards), dtype_named(dtype))
            for name, (shape, shards, dtype) in theirs.items()
        }
        for theirs in all_gather_json(mesh.control, sent)
    ]


def _full_of_one(sharded: ShardedTensor) -> torch.Tensor:
    full = torch.empty(sharded.full_shape, dtype=sharded.tensor.dtype)
    for shard in sharded.shards:
        full[shard.slices] = sharded.tensor.detach()[shard.local_slices].cpu()
    return full

"""Reading a checkpoint whose files are spread over the memory of several nodes, in any layout: each node gets the files
that its ranks need, then each rank reads as from a disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from onward.checkpoint.agreement import do_together, gather_from_all
from onward.checkpoint.manifest import read_manifest
from onward.checkpoint.memory.choosing import Chosen
from onward.checkpoint.memory.file_transfer import Transfer, transfer_files
from onward.checkpoint.memory.nodes import Nodes
from onward.checkpoint.reading import read_verified_tensors
from onward.checkpoint.stored_tensors import find_stored_shards
from onward.parallel.sharded_tensors import ShardedTensor

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes."""


def read_from_memory(
    chosen: Chosen,
    into: Mapping[str, ShardedTensor],
    nodes: Nodes,
    group: dist.ProcessGroup | None,
    optional: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """`read_sharded_tensors` from memory. Raises as it does.

    Args:
        chosen: the checkpoint, complete over all nodes.
        into: name -> this rank's sharded tensor.
        nodes: who shares which folder.
        group: the ranks that load together; None: this process alone.
        optional: see `read_sharded_tensors`.
    """
    manifest = do_together(group, lambda: read_manifest(chosen.path))
    files = {entry.name: entry for entry in manifest.files}
    holders: dict[str, list[int]] = {name: [] for name in files}
    for rank, names in enumerate(gather_from_all(group, list(chosen.files))):
        for name in names:
            holders[name].append(rank)
    served = [name for name, ranks in holders.items() if ranks[0] == nodes.rank]

    def boxes() -> list[list[object]]:
        own = replace(manifest, files=tuple(files[name] for name in served))
        return [
            [shard.file.name, name, list(shard.offsets), list(shard.sizes)]
            for name, shards in find_stored_shards(chosen.path, own).items()
            for shard in shards
        ]

    stored: dict[str, list[tuple[str, Box]]] = {}
    for part in gather_from_all(group, do_together(group, boxes)):  # type: ignore[arg-type]
        for file, name, offsets, sizes in part:
            stored.setdefault(name, []).append((file, (offsets, sizes)))
    needed = sorted(
        {
            file
            for name, sharded in into.items()
            for file, box in stored.get(name, ())
            if any(_overlap(box, (shard.offsets, shard.sizes)) for shard in sharded.shards)
        }
    )
    wanted = gather_from_all(group, needed)
    transfers = [
        Transfer(files[name], ranks[0], next(rank for rank in node if name in wanted[rank]))
        for name, ranks in holders.items()
        for node in nodes.ranks
        if not set(node) & set(ranks) and any(name in wanted[rank] for rank in node)
    ]
    transfer_files(group, transfers, chosen.path)
    own = replace(manifest, files=tuple(files[name] for name in needed))
    return read_verified_tensors(chosen.path, own, into, optional=optional, group=group)


def _overlap(one: Box, other: Box) -> bool:
    """Whether two boxes share an element; of a tensor without axes they do."""
    return all(
        max(begin, start) < min(begin + size, start + length)
        for begin, size, start, length in zip(*one, *other, strict=True)
    )

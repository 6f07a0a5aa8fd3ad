"""How `torch.distributed.checkpoint` plans the saving of sharded tensors: one write item for every shard, which one
rank writes; the shards of a tensor make up the full tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from onward.parallel.sharded_tensors import ShardedTensor


class ShardSavePlanner(DefaultSavePlanner):
    """Plans one save of a mapping from names to sharded tensors.

    torch's planner sees to it that shards held by several ranks are written by one of them, the one with least to
    write, and that shards neither overlap nor leave a hole.
    """

    def __init__(self, tensors: Mapping[str, ShardedTensor], names: Iterable[str]) -> None:
        """Plans `tensors`, which this rank may write; `names` are those of all it holds."""
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.tensors = tensors
        self._names = tuple(names)
        self._shards = {(name, shard.offsets): shard for name, sharded in tensors.items() for shard in sharded.shards}

    def create_local_plan(self) -> SavePlan:
        """One item for each shard that this rank is to write."""
        self.plan = SavePlan(
            [
                write_item(name, shard.offsets, shard.sizes, sharded.tensor.dtype, sharded.full_shape)
                for name, sharded in self.tensors.items()
                for shard in sharded.shards
                if sharded.num_elements or 0 in sharded.full_shape
            ],
            planner_data=self._names,
        )
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Each shard to one rank.

        Raises:
            ValueError: ranks differ about a tensor's shape or type, or the shards do not make up the full tensor.
        """
        _refuse_contradictions(all_plans)
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The elements of a shard, a view of the rank's tensor."""
        index = write_item.index
        assert index.offset is not None
        shard = self._shards[index.fqn, tuple(index.offset)]
        return self.tensors[index.fqn].tensor.detach()[shard.local_slices]

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The sharded tensor of a name."""
        return self.tensors[index.fqn]


def write_item(
    name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype, full_shape: Sequence[int]
) -> WriteItem:
    """The item that writes one shard of a tensor."""
    return WriteItem(
        index=MetadataIndex(name, torch.Size(offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(full_shape),
        ),
    )


def _refuse_contradictions(plans: list[SavePlan]) -> None:
    kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}
    sizes: dict[tuple[str, torch.Size], torch.Size] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            assert data is not None
            kind, chunk = (data.properties.dtype, data.size), data.chunk
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"{name!r} is {kinds[name]} on an earlier rank and {kind} on rank {rank}")
            if sizes.setdefault((name, chunk.offsets), chunk.sizes) != chunk.sizes:
                raise ValueError(f"two shards of {name!r} begin at {list(chunk.offsets)} and are of different sizes")
    # torch's planner does not look for holes where there is one rank.
    held: Counter[str] = Counter()
    for (name, _), shard in sizes.items():
        held[name] += math.prod(shard)
    for name, (_, size) in kinds.items():
        if held[name] != size.numel():
            raise ValueError(f"{name!r} has {size.numel()} elements, and the ranks write {held[name]} of them")
    for rank, plan in enumerate(plans):
        for name in plan.planner_data:
            if name not in kinds:
                raise ValueError(f"{name!r} is held by rank {rank}, and no rank writes it")


def numbered_keys(plans: list[SavePlan]) -> dict[str, str]:
    """The tensors of which some rank writes several shards, each with the beginning of its keys: its name and `#`, or
    more of them where another tensor's name begins so."""
    counts = [Counter(item.index.fqn for item in plan.items) for plan in plans]
    names = set().union(*counts)
    found = {}
    for name in sorted({name for count in counts for name in count if count[name] > 1}):
        beginning = f"{name}#"
        while any(other.startswith(beginning) for other in names):
            beginning += "#"
        found[name] = beginning
    return found

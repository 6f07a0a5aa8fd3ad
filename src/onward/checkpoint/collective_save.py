"""One save of all ranks, in the steps of torch's own `save`: plans, assignments, writing, completion.

Ranks send JSON. torch's `save` sends pickles, and whoever takes a rank's place executes code on all others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from onward.checkpoint.agreement import decide_together, rank_and_size
from onward.checkpoint.manifest import FileEntry
from onward.checkpoint.planning import ShardSavePlanner, write_item
from onward.checkpoint.storage import FilePlan, Publication, SafetensorsStorageWriter
from onward.parallel.messages import Json
from onward.parallel.sharded_tensors import ShardedTensor, dtype_name, dtype_named


def save_together(
    tensors: Mapping[str, ShardedTensor],
    names: Iterable[str],
    publication: Publication,
    record: Mapping[str, Json],
    rank_record: Mapping[str, Json] | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Every rank plans what it could write, the first decides who writes what, all write, the first completes it.

    Args:
        tensors: what this rank may write.
        names: of all that it holds.
        publication: where the files go, and what is done before and after.
        record, rank_record: go into the manifest, see `SafetensorsStorageWriter`.
        group: the ranks that save together; None: this process alone.

    Raises:
        StorageError: the disk refused; on every rank, with the rank where it did.
        OnwardError: anything else failed on some rank; without a group it goes through as it is.
    """
    rank, _ = rank_and_size(group)
    planner = ShardSavePlanner(tensors, names)
    storage = SafetensorsStorageWriter(publication, record, rank_record)
    planned: list[SavePlan] = []
    metadata: list[Metadata] = []

    def propose() -> Json:
        storage.set_up_storage_writer(rank == 0)
        planned.append(storage.prepare_local_plan(planner.create_local_plan()))
        return _plan_to_json(planned[0])

    def assign(proposals: list[Any]) -> Sequence[Json]:
        local = [_plan_from_json(one) for one in proposals]
        plans, found = planner.create_global_plan(local)
        metadata.append(found)
        return [
            _assignment(before, after) for before, after in zip(local, storage.prepare_global_plan(plans), strict=True)
        ]

    assigned = decide_together(group, propose, assign)

    def write() -> Json:
        own = replace(
            planned[0],
            items=[planned[0].items[index] for index in assigned["items"]],
            storage_data=FilePlan(assigned["file"], assigned["numbered"]),
        )
        results = storage.write_data(own, planner).value()
        return [vars(entry) for entry in dict.fromkeys(result.storage_data for result in results)]

    def finish(written: list[Any]) -> Sequence[Json]:
        entries = [[FileEntry(**one) for one in files] for files in written]
        storage.finish(
            metadata[0],
            [[WriteResult(MetadataIndex(one.name), one.size_bytes, one) for one in files] for files in entries],
        )
        return [None] * len(written)

    decide_together(group, write, finish)


def _assignment(local: SavePlan, assigned: SavePlan) -> Json:
    """Which of its items a rank writes, by their places in its own plan, and into which file."""
    places = {item.index: place for place, item in enumerate(local.items)}
    file: FilePlan = assigned.storage_data
    return {
        "items": [places[item.index] for item in assigned.items],
        "file": file.name,
        "numbered": dict(file.numbered),
    }


def _plan_to_json(plan: SavePlan) -> Json:
    items: list[Json] = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None
        chunk = data.chunk
        items.append(
            [item.index.fqn, list(chunk.offsets), list(chunk.sizes), dtype_name(data.properties.dtype), list(data.size)]
        )
    return {"items": items, "names": list(plan.planner_data), "rank_record": plan.storage_data}


def _plan_from_json(plan: Mapping[str, Any]) -> SavePlan:
    return SavePlan(
        [
            write_item(name, offsets, sizes, dtype_named(dtype), full_shape)
            for name, offsets, sizes, dtype, full_shape in plan["items"]
        ],
        storage_data=plan["rank_record"],
        planner_data=tuple(plan["names"]),
    )

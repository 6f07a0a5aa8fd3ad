"""JSON between the ranks of a group. torch's collectives of objects unpickle what arrives, so that whoever takes a
rank's place on the network executes code on all others; what arrives here is data, and its size is bounded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from onward.errors import OnwardError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

LARGEST_BYTES = 2**30
"""Of one rank's message. The largest that a run sends, a rank's plan of a checkpoint, has about 200 bytes a tensor."""


def all_gather_json(group: dist.ProcessGroup, value: Json) -> list[Any]:
    """Every rank's value, in the order of ranks; all ranks of a Gloo group call this.

    Raises:
        OnwardError: a message is larger than `LARGEST_BYTES`, or is no JSON.
    """
    own = _encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    received = [torch.empty(_largest(sizes), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(received, _padded(own, len(received[0])), group=group)
    return [_decode(rank, data, size) for rank, (data, size) in enumerate(zip(received, sizes, strict=True))]


def gather_json(group: dist.ProcessGroup, value: Json) -> list[Any] | None:
    """Every rank's value on the group's first rank, None on the others. Raises as `all_gather_json` does."""
    own = _encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    is_first, length = dist.get_rank(group) == 0, _largest(sizes)
    received = [torch.empty(length, dtype=torch.uint8) for _ in sizes] if is_first else None
    dist.gather(_padded(own, length), received, group=group, group_dst=0)
    if received is None:
        return None
    return [_decode(rank, data, size) for rank, (data, size) in enumerate(zip(received, sizes, strict=True))]


def scatter_json(group: dist.ProcessGroup, values: Sequence[Json] | None) -> Any:
    """This rank's value out of those that the group's first rank passes, one for each rank; the others pass None.

    Raises:
        OnwardError: as `all_gather_json` does.
    """
    encoded = None if values is None else [_encode(value) for value in values]
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    if encoded is not None:
        sizes = torch.tensor([one.numel() for one in encoded])
    dist.broadcast(sizes, group=group, group_src=0)
    received = torch.empty(_largest(list(sizes)), dtype=torch.uint8)
    padded = None if encoded is None else [_padded(one, len(received)) for one in encoded]
    dist.scatter(received, padded, group=group, group_src=0)
    return _decode(0, received, sizes[dist.get_rank(group)])


def broadcast_json(group: dist.ProcessGroup, value: Json, source: int = 0) -> Any:
    """The value of the group's rank `source`, on every rank; the others' are ignored.

    Raises:
        OnwardError: as `all_gather_json` does.
    """
    is_source = dist.get_rank(group) == source
    own = _encode(value) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([own.numel()])
    dist.broadcast(size, group=group, group_src=source)
    received = own if is_source else torch.empty(_largest([size]), dtype=torch.uint8)
    dist.broadcast(received, group=group, group_src=source)
    return _decode(source, received, size)


def _encode(value: Json) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _padded(data: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(data, (0, length - data.numel()))


def _largest(sizes: Sequence[torch.Tensor]) -> int:
    numbers = [int(size) for size in sizes]
    for rank, number in enumerate(numbers):
        if not 0 < number <= LARGEST_BYTES:
            raise OnwardError(
                f"rank {rank} announces a message of {number:,} bytes; expected 1 to {LARGEST_BYTES:,}. Check that all "
                "ranks run the same version of onward, and that only they reach its ports."
            )
    return max(numbers)


def _decode(rank: int, data: torch.Tensor, size: torch.Tensor) -> Any:
    content = data[: int(size)].numpy().tobytes()
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise OnwardError(
            f"rank {rank} sent {content[:40]!r}, which is no JSON ({error}). Check that all ranks run the same version "
            "of onward, and that only they reach its ports."
        ) from None

"""Tensors of any shape between the ranks of a pipeline, with a header that says what comes; no pickle on the wire."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

MOST_AXES = 8
_TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def send(tensors: Sequence[torch.Tensor], to: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Sends tensors to a rank of the group, which calls `receive` for as many."""
    dist.send(_header(tensors, device), group=group, group_dst=to)
    for tensor in tensors:
        dist.send(tensor.contiguous(), group=group, group_dst=to)


def receive(count: int, source: int, group: dist.ProcessGroup, device: torch.device) -> list[torch.Tensor]:
    """Receives as many tensors from a rank of the group."""
    header = torch.empty((count, 2 + MOST_AXES), dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=source)
    tensors = _empty(header, device)
    for tensor in tensors:
        dist.recv(tensor, group=group, group_src=source)
    return tensors


def broadcast(
    tensors: Sequence[torch.Tensor] | None, count: int, source: int, group: dist.ProcessGroup, device: torch.device
) -> list[torch.Tensor]:
    """Gives a rank's tensors to all ranks of the group; the others pass None."""
    if tensors is None:
        header = torch.empty((count, 2 + MOST_AXES), dtype=torch.int64, device=device)
    else:
        header = _header(tensors, device)
    dist.broadcast(header, group=group, group_src=source)
    found = _empty(header, device) if tensors is None else [tensor.contiguous() for tensor in tensors]
    for tensor in found:
        dist.broadcast(tensor, group=group, group_src=source)
    return found


def _header(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A row for each tensor: element type, number of axes, their sizes."""
    rows = [[_TYPES.index(t.dtype), t.dim(), *t.shape, *([0] * (MOST_AXES - t.dim()))] for t in tensors]
    return torch.tensor(rows, dtype=torch.int64, device=device).reshape(len(tensors), 2 + MOST_AXES)


def _empty(header: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    rows = header.tolist()
    return [torch.empty(row[2 : 2 + row[1]], dtype=_TYPES[row[0]], device=device) for row in rows]

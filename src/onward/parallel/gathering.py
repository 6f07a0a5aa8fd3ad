"""Whole tensors out of the pieces that ranks hold, on rank 0, in host memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from onward.parallel.launch.process import Mesh
from onward.parallel.messages import Json, all_gather_json
from onward.parallel.pieces import Piece, dtype_name, dtype_named
from onward.plan.shards import Box

_Outline = tuple[tuple[int, ...], tuple[Box, ...], torch.dtype]
"""Shape of a whole tensor, the boxes of it that a rank holds, and its type."""


def gather_whole(mesh: Mesh, pieces: Mapping[str, Piece]) -> dict[str, torch.Tensor]:
    """Collects every tensor that any rank holds a piece of.

    Args:
        mesh: the ranks; all of them must call this.
        pieces: of this rank; names may differ from rank to rank.

    Returns:
        On rank 0 name -> whole tensor on the CPU; elsewhere nothing.
    """
    written = {name: piece for name, piece in pieces.items() if piece.is_written}
    if mesh.control is None:
        return {name: _whole_of_one(piece) for name, piece in written.items()}
    found: dict[str, torch.Tensor] = {}
    for rank, theirs in enumerate(_outlines(mesh, written)):
        for name, (shape, boxes, dtype) in theirs.items():
            for box in boxes:
                if mesh.rank == rank:
                    part = written[name].tensor.detach()[box.local_slices].cpu().contiguous()
                    if rank:
                        dist.send(part, 0, group=mesh.control)
                elif mesh.rank == 0:
                    part = torch.empty(box.sizes, dtype=dtype)
                    dist.recv(part, rank, group=mesh.control)
                if mesh.rank == 0:
                    found.setdefault(name, torch.empty(shape, dtype=dtype))[box.whole_slices] = part
    return found


def describe_whole(mesh: Mesh, pieces: Mapping[str, Piece]) -> dict[str, torch.Tensor]:
    """On every rank what `gather_whole` would collect, without the values: tensors of the device "meta"."""
    outlines = _outlines(mesh, {name: piece for name, piece in pieces.items() if piece.is_written})
    return {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for theirs in outlines
        for name, (shape, _, dtype) in theirs.items()
    }


def _outlines(mesh: Mesh, written: Mapping[str, Piece]) -> list[dict[str, _Outline]]:
    """Of every rank: what it would write of which tensor."""
    own = {name: (p.whole_shape, p.boxes, p.tensor.dtype) for name, p in written.items()}
    if mesh.control is None:
        return [own]
    sent: dict[str, Json] = {
        name: [shape, [[box.whole_offsets, box.sizes, box.local_offsets] for box in boxes], dtype_name(dtype)]
        for name, (shape, boxes, dtype) in own.items()
    }
    return [
        {
            name: (tuple(shape), tuple(Box(*map(tuple, box)) for box in boxes), dtype_named(dtype))
            for name, (shape, boxes, dtype) in theirs.items()
        }
        for theirs in all_gather_json(mesh.control, sent)
    ]


def _whole_of_one(piece: Piece) -> torch.Tensor:
    whole = torch.empty(piece.whole_shape, dtype=piece.tensor.dtype)
    for box in piece.boxes:
        whole[box.whole_slices] = piece.tensor.detach()[box.local_slices].cpu()
    return whole

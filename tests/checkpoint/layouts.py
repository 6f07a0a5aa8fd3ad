"""Layouts of a run for the tests: which boxes of a few tensors each rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from onward.parallel.pieces import Piece
from onward.plan.shards import Box, WeightShard, cut

Layout = Callable[[int], dict[str, Piece]]
"""From a rank to its pieces, their tensors filled with the values of `whole_tensors`."""


def whole_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
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


def piece_of(whole: torch.Tensor, boxes: tuple[Box, ...], local_shape: tuple[int, ...], written: bool = True) -> Piece:
    """The piece of these boxes, with the whole tensor's values."""
    local = torch.zeros(local_shape, dtype=whole.dtype)
    for box in boxes:
        local[box.local_slices] = whole[box.whole_slices]
    return Piece(local, tuple(whole.shape), boxes, written)


def shard_of(whole: torch.Tensor, shard: WeightShard, rank: int, size: int) -> Piece:
    """A horizontal rank's piece."""
    shape = tuple(whole.shape)
    return piece_of(whole, shard.boxes(shape, rank, size), shard.local_shape(shape, rank, size))


def rows_of(piece: Piece, rank: int, size: int) -> Piece:
    """A ZeRO rank's piece of a rank's piece: equal numbers of rows, the last ranks with fewer or none."""
    if piece.tensor.dim() == 0 or piece.tensor.shape[0] == 0:
        return Piece(piece.tensor, piece.whole_shape, piece.boxes, piece.is_written and rank == 0)
    length = piece.tensor.shape[0]
    rows = -(-length // size)
    start, stop = min(rank * rows, length), min((rank + 1) * rows, length)
    return Piece(piece.tensor[start:stop].clone(), piece.whole_shape, cut(piece.boxes, start, stop))


HORIZONTAL = {
    "weights/fc": WeightShard(0, (4, 6)),
    "weights/qkv": WeightShard(1, (4, 4, 4)),
    "slots/exp_avg/fc": WeightShard(0, (4, 6)),
    "weights/conv": WeightShard(1, (4,)),
}


def one(rank: int, seed: int = 0) -> dict[str, Piece]:
    """One process."""
    return {name: Piece.whole(whole) for name, whole in whole_tensors(seed).items()}


def rows_on_2(rank: int, seed: int = 0) -> dict[str, Piece]:
    """Every tensor cut along its first axis; what cannot be is held, and offered for writing, by both."""
    return {
        name: shard_of(whole, WeightShard(0, (whole.shape[0],)), rank, 2) if whole.numel() > 1 else Piece.whole(whole)
        for name, whole in whole_tensors(seed).items()
    }


def fused_on_2(rank: int, seed: int = 0) -> dict[str, Piece]:
    """Horizontal, with a fused projection; the rest replicated and written by rank 0."""
    return {
        name: shard_of(whole, HORIZONTAL[name], rank, 2) if name in HORIZONTAL else Piece.whole(whole, rank == 0)
        for name, whole in whole_tensors(seed).items()
    }


def zero_on_3(rank: int, seed: int = 0) -> dict[str, Piece]:
    """ZeRO: uneven rows, some ranks without any."""
    return {name: rows_of(Piece.whole(whole), rank, 3) for name, whole in whole_tensors(seed).items()}


def stages_on_3(rank: int, seed: int = 0) -> dict[str, Piece]:
    """Pipeline: other names on every rank, none on the second, one of them held by the two others."""
    tensors = whole_tensors(seed)
    own: Mapping[int, list[str]] = {
        0: ["weights/fc", "weights/qkv#0", "slots/exp_avg/fc", "states/empty"],
        1: [],
        2: [name for name in tensors if name not in ("weights/qkv#0", "slots/exp_avg/fc", "states/empty")],
    }
    return {name: Piece.whole(tensors[name]) for name in own[rank]}


def mixed_on_4(rank: int, seed: int = 0) -> dict[str, Piece]:
    """Two data times two horizontal: ZeRO's rows of a fused projection's share."""
    return {name: rows_of(piece, rank // 2, 2) for name, piece in _replicated_once(rank, seed).items()}


def _replicated_once(rank: int, seed: int) -> dict[str, Piece]:
    pieces = fused_on_2(rank % 2, seed)
    return {
        name: piece if piece.boxes and piece.is_written else Piece(piece.tensor, piece.whole_shape, piece.boxes, False)
        for name, piece in pieces.items()
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

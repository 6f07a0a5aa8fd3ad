"""Tokens next to a rank's own, for convolutions: the edges of all chunks in one collective, with its gradient.

A rank has two chunks of a sequence (`onward.plan.context.ranges`), whose neighbours are other ranks'. A convolution
runs over both at once; what it computes where the end of one meets the beginning of the other is cut off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onward.lowering.registry import lowers
from onward.parallel.context.collectives import all_gather, reduce_scatter
from onward.plan.context.ranges import ranges_of
from onward.plan.horizontal.cuts import DOMAIN


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, size: int, group: str) -> Tensor:
        """The tensors of all ranks."""
        stacked: Tensor = all_gather(x, size, group)
        return stacked

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the group."""
        ctx.group = inputs[2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The sum of the ranks' gradients for the rank's own tensor."""
        own: Tensor = reduce_scatter(gradients[0], ctx.group)
        return own, None, None


@lowers("ContextHalo", domain=DOMAIN)
def read_neighbours(
    X: Tensor,
    *,
    cut_axis: int,
    blocks: tuple[int, ...],
    before: int,
    after: int,
    ranks: int,
    context_rank: int,
    context_group: str,
) -> Tensor:
    """Each chunk of a rank with `before` elements of the axis before it and `after` behind it: zeros at the ends.

    No chunk but the last of a sequence is shorter than `before` and `after`, which the plan has checked.
    """
    chunks = _chunks(X, cut_axis, blocks[0], context_rank, ranks)
    edges = []
    for place in range(2):
        chunk = chunks[place] if place < len(chunks) else X.narrow(cut_axis, 0, 0)
        length = chunk.shape[cut_axis]
        last, first = min(before, length), min(after, length)
        edges += [_zeros(X, cut_axis, before - last), chunk.narrow(cut_axis, length - last, last)]
        edges += [chunk.narrow(cut_axis, 0, first), _zeros(X, cut_axis, after - first)]
    stacked: Tensor = _Stack.apply(torch.cat(edges, cut_axis), ranks, context_group)  # type: ignore[no-untyped-call]
    found = []
    for chunk, number in zip(chunks, (context_rank, 2 * ranks - 1 - context_rank), strict=False):
        found += [
            _edge(stacked, cut_axis, number - 1, ranks, 0, before),
            chunk,
            _edge(stacked, cut_axis, number + 1, ranks, before, after),
        ]
    return torch.cat(found, cut_axis)


def _edge(stacked: Tensor, axis: int, number: int, ranks: int, start: int, count: int) -> Tensor:
    """Of the edges of all ranks, `count` elements from `start` on of those of a chunk; zeros beyond the sequence."""
    if not 0 <= number < 2 * ranks:
        return _zeros(stacked[0], axis, count)
    own = stacked[min(number, 2 * ranks - 1 - number)]
    first = 0 if number < ranks else own.shape[axis] // 2
    return own.narrow(axis, first + start, count)


@lowers("ContextTrim", domain=DOMAIN)
def trim(Y: Tensor, *, cut_axis: int, blocks: tuple[int, ...], excess: int, ranks: int, context_rank: int) -> Tensor:
    """A rank's own elements of what was computed of its widened chunks: without the `excess` between these."""
    return torch.cat(_chunks(Y, cut_axis, blocks[0], context_rank, ranks, excess), cut_axis)


def _chunks(x: Tensor, axis: int, block: int, rank: int, size: int, between: int = 0) -> list[Tensor]:
    found, start = [], 0
    for first, last in ranges_of(block, rank, size):
        found.append(x.narrow(axis, start, last - first))
        start += last - first + between
    return found


def _zeros(x: Tensor, axis: int, count: int) -> Tensor:
    return x.new_zeros((*x.shape[:axis], count, *x.shape[axis + 1 :]))

"""Collectives between context ranks, each the gradient of another: parts of sequences gathered, and added up.

As custom operators of torch, so that fake tensors and compilers know their shapes without communicating anything. The
objective of every rank is the sum of all ranks' losses: what a rank gathers or adds up has the gradients of all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onward.lowering.process_groups import group_named
from onward.plan.context.ranges import TokenAxis, ranges_of


@torch.library.custom_op("onward::context_all_reduce", mutates_args=())
def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum over the ranks, without its own gradient."""
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group_named(group))
    return result


@all_reduce.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("onward::context_all_gather", mutates_args=())
def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """The tensors of all ranks, of one shape, stacked; without its own gradient."""
    result = x.new_empty((size, *x.shape))
    dist.all_gather(list(result.unbind(0)), x.contiguous(), group=group_named(group))
    return result


@all_gather.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty((size, *x.shape))


@torch.library.custom_op("onward::context_reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """Of tensors stacked as `all_gather` gives them, the rank's own, summed over the ranks."""
    result = torch.empty_like(x[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter(result, [one.contiguous() for one in x.unbind(0)], group=group_named(group))
    return result


@reduce_scatter.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[1:])


def own_part(full: Tensor, axis: int, tokens: TokenAxis, rank: int, size: int) -> Tensor:
    """What a rank holds of a full tensor."""
    pieces, start, rows = [], 0, tokens.rows
    for block in tokens.blocks:
        pieces += [full.narrow(axis, (start + a) * rows, (b - a) * rows) for a, b in ranges_of(block, rank, size)]
        start += block
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)


def _padded(part: Tensor, axis: int, length: int) -> Tensor:
    missing = length - part.shape[axis]
    if not missing:
        return part
    return torch.cat([part, part.new_zeros((*part.shape[:axis], missing, *part.shape[axis + 1 :]))], axis)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: int, tokens: TokenAxis, size: int, group: str) -> Tensor:
        """All parts, in the order of the sequence."""
        longest = max(tokens.local_length(rank, size) for rank in range(size))
        stacked = all_gather(_padded(x, axis, longest), size, group)
        places = [0] * size
        pieces = []
        for block in tokens.blocks:
            found = []
            for rank in range(size):
                for start, end in ranges_of(block, rank, size):
                    count = (end - start) * tokens.rows
                    found.append((start, stacked[rank].narrow(axis, places[rank], count)))
                    places[rank] += count
            pieces += [piece for _, piece in sorted(found, key=lambda one: one[0])]
        return torch.cat(pieces, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the cut, and which part of it is this rank's."""
        ctx.cut, ctx.own = inputs[1:], inputs[0].shape[inputs[1]]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The sum of the ranks' gradients for the rank's own part."""
        axis, tokens, size, group = ctx.cut
        longest = max(tokens.local_length(rank, size) for rank in range(size))
        parts = [_padded(own_part(gradients[0], axis, tokens, rank, size), axis, longest) for rank in range(size)]
        return reduce_scatter(torch.stack(parts), group).narrow(axis, 0, ctx.own), None, None, None, None


def gather(x: Tensor, axis: int, tokens: TokenAxis, size: int, group: str) -> Tensor:
    """The full tensor of which every rank has a part along an axis of tokens."""
    found: Tensor = _Gather.apply(x, axis, tokens, size, group)  # type: ignore[no-untyped-call]
    return found


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        """The sum over the ranks."""
        total: Tensor = all_reduce(x, group)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the group."""
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The sum of the ranks' gradients."""
        total: Tensor = all_reduce(gradients[0], ctx.group)
        return total, None


def add_up(x: Tensor, group: str) -> Tensor:
    """The sum over the ranks, with its gradient."""
    total: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return total

"""The operators of the domain `onward.parallel`, in addition to the loss and dropout.

Each knows from its attributes how its operand is cut: along `cut_axis`, into `blocks` that `size` ranks share, of which
this is `rank`.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from onward.lowering.passes import only_first_derivative
from onward.lowering.registry import lowers
from onward.parallel.horizontal.collectives import EnterRegion, LeaveRegion, all_gather, all_reduce
from onward.plan.horizontal.cuts import DOMAIN
from onward.plan.shards import Sharding, range_of_rank


@lowers("Enter", domain=DOMAIN)
def enter(X: Tensor, *, horizontal_group: str) -> Tensor:
    """A full value on its way into a region; its gradient is added up over the ranks."""
    return EnterRegion.apply(X, horizontal_group)  # type: ignore[no-any-return,no-untyped-call]


@lowers("AllReduce", domain=DOMAIN)
def add_up(X: Tensor, *, horizontal_group: str) -> Tensor:
    """The sum of the ranks' partial sums."""
    return LeaveRegion.apply(X, horizontal_group)  # type: ignore[no-any-return,no-untyped-call]


@lowers("LocalPart", domain=DOMAIN)
def local_part(
    X: Tensor,
    *,
    cut_axis: int,
    blocks: tuple[int, ...],
    parts: tuple[int, ...] = (),
    held: tuple[int, ...] = (),
    rank: int,
    size: int,
) -> Tensor:
    """A rank's shard of a full value, or of the larger shard that it holds (`held` are the parts of that one's blocks).

    Without blocks the axis is one, of any length.
    """
    if not held:
        blocks = _blocks_of(X.shape[cut_axis], blocks)
        held, parts = (1,) * len(blocks), parts[:1] * len(blocks) if len(set(parts)) == 1 else parts
    elif len(set(blocks)) == len(set(held)) == 1:  # as many as there are in the batch at hand
        count = X.shape[cut_axis] // Sharding(cut_axis, blocks[:1], held[:1]).local_size(rank, size)
        blocks, held, parts = blocks[:1] * count, held[:1] * count, parts[:1] * count
    found, place = [], 0
    larger = Sharding(cut_axis, blocks, held).ranges(rank, size)
    for (first, last), (start, end) in zip(larger, Sharding(cut_axis, blocks, parts).ranges(rank, size), strict=True):
        found.append(X.narrow(cut_axis, place + start - first, end - start))
        place += last - first
    return found[0] if len(found) == 1 else torch.cat(found, cut_axis)


def _blocks_of(length: int, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks of an axis; equal ones may be more or fewer than in the batch that the plan was made for.

    Raises:
        ValueError: the blocks do not make up the axis.
    """
    if not blocks:
        return (length,)
    if sum(blocks) == length:
        return blocks
    if len(set(blocks)) == 1 and length % blocks[0] == 0:
        return blocks[:1] * (length // blocks[0])
    raise ValueError(f"an axis of {length} is not made of blocks {list(blocks)}; the plan was made for other shapes.")


class _Gathered(torch.autograd.Function):
    """Shards become the full tensor, whose gradient, which every rank has, becomes that of the shard."""

    @staticmethod
    def forward(x: Tensor, cut: Sharding, rank: int, size: int, group: str) -> Tensor:
        """The full tensor, block by block, each in the order of the ranks."""
        lengths = [cut.local_size(r, size) for r in range(size)]
        short = max(lengths) - lengths[rank]
        padding = [x, x.new_zeros((*x.shape[: cut.axis], short, *x.shape[cut.axis + 1 :]))] if short else [x]
        stacked = all_gather(torch.cat(padding, cut.axis), size, group)
        pieces: list[Tensor] = []
        starts, ranges = [0] * size, [cut.ranges(r, size) for r in range(size)]
        for block, copies in enumerate(cut.copies(size)):
            for r in range(size):
                first, last = ranges[r][block]
                if r % copies == 0:
                    pieces.append(stacked[r].narrow(cut.axis, starts[r], last - first))
                starts[r] += last - first
        return torch.cat(pieces, cut.axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the cut."""
        ctx.cut, ctx.rank, ctx.size, _ = inputs[1:]

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The rank's shard."""
        cut = ctx.cut
        part = local_part(
            gradients[0], cut_axis=cut.axis, blocks=cut.blocks, parts=cut.parts, rank=ctx.rank, size=ctx.size
        )
        return part, None, None, None, None


@lowers("AllGather", domain=DOMAIN)
def gather_full(
    X: Tensor,
    *,
    cut_axis: int,
    blocks: tuple[int, ...],
    parts: tuple[int, ...] = (),
    rank: int,
    size: int,
    horizontal_group: str,
) -> Tensor:
    """The full value of which every rank has a part."""
    cut = Sharding(cut_axis, blocks, parts)
    return _Gathered.apply(X, cut, rank, size, horizontal_group)  # type: ignore[no-any-return,no-untyped-call]


@lowers("ShardedGather", domain=DOMAIN)
def sharded_gather(
    data: Tensor,
    indices: Tensor,
    *,
    axis: int = 0,
    cut_axis: int,
    blocks: tuple[int, ...],
    rank: int,
    size: int,
) -> Tensor:
    """Rows of a table of which the ranks hold ranges: zeros for rows of others, so that the sum over ranks is
    complete.

    Args:
        data: the rank's rows, [n, ...].
        indices: of the entire table, any shape; negative ones count from its end.

    Raises:
        ValueError: an index is out of range (seen on the CPU only).
    """
    (rows,) = blocks
    start, end = range_of_rank(rows, rank, size)
    positions = torch.where(indices < 0, indices + rows, indices)
    is_eager_on_cpu = type(positions) is Tensor and positions.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_eager_on_cpu and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= rows:
            raise ValueError(
                f"index {high if high >= rows else low - rows} is out of range for a table of {rows} rows."
            )
    own = (positions >= start) & (positions < end)
    local = torch.where(own, positions - start, 0)
    found = data[local]
    return found.masked_fill(~own.reshape(*own.shape, *[1] * (found.ndim - own.ndim)), 0)


@lowers("ShardedArgMax", domain=DOMAIN)
def sharded_arg_max(
    data: Tensor,
    *,
    axis: int = 0,
    keepdims: int = 1,
    select_last_index: int = 0,
    cut_axis: int,
    blocks: tuple[int, ...],
    rank: int,
    size: int,
    horizontal_group: str,
) -> Tensor:
    """The place of the maximum of a full axis: the first one (or the last) where several are equal."""
    values = data.detach()
    best = values.amax(cut_axis, keepdim=True)
    places = _places(blocks, rank, size, data.device).reshape([-1 if a == cut_axis else 1 for a in range(data.ndim)])
    limit = sum(blocks)
    if select_last_index:
        mine = torch.where(values == best, places, -1).amax(cut_axis)
    else:
        mine = torch.where(values == best, places, limit).amin(cut_axis)
    all_best, all_places = (all_gather(value, size, horizontal_group) for value in (best.squeeze(cut_axis), mine))
    top = all_best == all_best.amax(0, keepdim=True)
    if select_last_index:
        found = torch.where(top, all_places, -1).amax(0)
    else:
        found = torch.where(top, all_places, limit).amin(0)
    return found.unsqueeze(cut_axis) if keepdims else found


def _places(blocks: tuple[int, ...], rank: int, size: int, device: torch.device) -> Tensor:
    """Where the rank's elements are on the full axis."""
    firsts = itertools.accumulate(blocks, initial=0)
    ranges = [(first, *range_of_rank(block, rank, size)) for first, block in zip(firsts, blocks, strict=False)]
    return torch.cat([torch.arange(first + start, first + end, device=device) for first, start, end in ranges])


class _Softmax(torch.autograd.Function):
    """Softmax (or its logarithm) over an axis of which every rank has a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, logarithm: bool, group: str) -> Tensor:
        """Reduces the maximum and the sum of every row over the ranks."""
        shifted = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        shifted = shifted - all_reduce(shifted.amax(axis, keepdim=True), "max", group)
        exponential = shifted.exp()
        total = all_reduce(exponential.sum(axis, keepdim=True), "sum", group)
        result = shifted - total.log() if logarithm else exponential / total
        ctx.save_for_backward(result)
        ctx.axis, ctx.logarithm, ctx.dtype, ctx.group = axis, logarithm, x.dtype, group
        found: Tensor = result.to(x.dtype)
        return found

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Reduces one sum a row over the ranks."""
        (result,) = ctx.saved_tensors
        gradient = gradients[0].to(result.dtype)
        weighed = gradient if ctx.logarithm else gradient * result
        total = all_reduce(weighed.sum(ctx.axis, keepdim=True), "sum", ctx.group)
        found = gradient - result.exp() * total if ctx.logarithm else result * (gradient - total)
        return found.to(ctx.dtype), None, None, None


@lowers("ShardedSoftmax", domain=DOMAIN)
def sharded_softmax(
    X: Tensor, *, axis: int = -1, cut_axis: int, blocks: tuple[int, ...], rank: int, size: int, horizontal_group: str
) -> Tensor:
    """Softmax over the cut axis; of 16 bits in float32."""
    return _Softmax.apply(X, cut_axis, False, horizontal_group)  # type: ignore[no-any-return,no-untyped-call]


@lowers("ShardedLogSoftmax", domain=DOMAIN)
def sharded_log_softmax(
    X: Tensor, *, axis: int = -1, cut_axis: int, blocks: tuple[int, ...], rank: int, size: int, horizontal_group: str
) -> Tensor:
    """The logarithm of softmax over the cut axis; of 16 bits in float32."""
    return _Softmax.apply(X, cut_axis, True, horizontal_group)  # type: ignore[no-any-return,no-untyped-call]

"""Process groups by the names that torch has for them, which a program's code can hold; a sum and a gather over one.

A graph's code is text with constants in it, so that a compiler reads it; a group itself is neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from onward.lowering.passes import only_first_derivative


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of a name that torch gave it.

    Raises:
        RuntimeError: this process has no such group.
    """
    if not name:
        raise RuntimeError(
            "the program was lowered without a process group; give its ExecutionContext the group's name."
        )
    found: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]
    return found


def sum_over_group(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over a group with a gradient: the sum over the group of the ranks' gradients."""
    return cast(torch.Tensor, _GroupSum.apply(tensor, group))  # type: ignore[no-untyped-call]


class _GroupSum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        context.group = group
        return _summed(tensor, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_over_group(gradient, context.group), None


def _summed(tensor: torch.Tensor, group: str) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group_named(group))
    return total


def begin_sum(tensor: torch.Tensor, group: str) -> Callable[[], torch.Tensor]:
    """Begins to add up a tensor over a group, in its place; what is returned waits for the sum, and gives it.

    Every rank issues it at the same point of its order, as any collective.
    """
    total = tensor.contiguous()
    work = dist.all_reduce(total, group=group_named(group), async_op=True)
    return lambda: _waited(work, total)


def begin_reduce_scatter(tensor: torch.Tensor, axis: int, size: int, group: str) -> Callable[[], torch.Tensor]:
    """Begins to add up a tensor over a group of `size` ranks; what is returned gives a rank's equal share along an
    axis."""
    shares = [share.contiguous() for share in tensor.chunk(size, axis)]
    own = torch.empty_like(shares[0])
    work = dist.reduce_scatter(own, shares, group=group_named(group), async_op=True)
    return lambda: _waited(work, own)


def _waited(work: dist.Work | None, tensor: torch.Tensor) -> torch.Tensor:
    if work is not None:  # None: this process is not in the group
        work.wait()
    return tensor


def largest_of_group(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The largest over a group, element by element, without a gradient."""
    largest = tensor.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group_named(group))
    return largest


def exchange_rows(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
    """Rows for all ranks of a group in order, `sent` for each -> those that each has for this one, `received`."""
    return cast(torch.Tensor, _RowExchange.apply(rows, sent, received, group))  # type: ignore[no-untyped-call]


def exchange_counts(counts: torch.Tensor, group: str) -> torch.Tensor:
    """Numbers for all ranks of a group, [ranks, n] -> those that each has for this one."""
    result = torch.empty_like(counts)
    dist.all_to_all_single(result, counts.contiguous(), group=group_named(group))
    return result


@torch.library.custom_op("onward::expert_exchange", mutates_args=())
def _exchange(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=group_named(group))
    return result


@_exchange.register_fake
def _(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
    return rows.new_empty((sum(received), *rows.shape[1:]))


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str
    ) -> torch.Tensor:
        context.sizes = sent, received, group
        return cast(torch.Tensor, _exchange(rows, list(sent), list(received), group))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, group = context.sizes
        return exchange_rows(gradient, received, sent, group), None, None, None


def gather_over_group(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The rows of all ranks, its own first, then those of the next ranks in turn; ranks may have different counts.

    The gradient of a rank's rows is the sum of the gradients that all ranks have for them.
    """
    if isinstance(tensor, FakeTensor):
        return torch.cat([tensor] * dist.get_world_size(group_named(group)))
    return cast(torch.Tensor, _GroupGather.apply(tensor, group))  # type: ignore[no-untyped-call]


class _GroupGather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        found = group_named(group)
        size, rank = dist.get_world_size(found), dist.get_rank(found)
        count = torch.tensor([len(tensor)], device=tensor.device)
        counts = [torch.empty_like(count) for _ in range(size)]
        dist.all_gather(counts, count, group=found)
        context.group, context.rank, context.counts = group, rank, torch.cat(counts).tolist()
        longest = max(context.counts)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        rows = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(rows, padded, group=found)
        kept = [one[:own] for one, own in zip(rows, context.counts, strict=True)]
        return torch.cat([*kept[rank:], *kept[:rank]])

    @staticmethod
    @only_first_derivative
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        counts, rank = context.counts, context.rank
        of_ranks = torch.split(gradient, [*counts[rank:], *counts[:rank]])
        first = len(counts) - rank
        total = _summed(torch.cat([*of_ranks[first:], *of_ranks[:first]]), context.group)
        return torch.split(total, counts)[rank], None

"""Collectives between the tensor-parallel ranks: sums, maxima, all parts of a tensor; each in both directions of a
pass.

The collectives are custom operators of torch, so that fake tensors and compilers know their shapes without
communicating anything; each takes the name of the process group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onward.lowering.process_groups import group_named

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@torch.library.custom_op("onward::horizontal_all_reduce", mutates_args=())
def all_reduce(x: Tensor, operation: str, group: str) -> Tensor:
    """The sum or the maximum of a tensor over the ranks; without its own gradient."""
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, _OPERATIONS[operation], group=group_named(group))
    return result


@all_reduce.register_fake
def _(x: Tensor, operation: str, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("onward::horizontal_all_gather", mutates_args=())
def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """The tensors of all ranks, of one shape, stacked: [size, *x.shape]; without its own gradient."""
    result = x.new_empty((size, *x.shape))
    dist.all_gather(list(result.unbind(0)), x.contiguous(), group=group_named(group))
    return result


@all_gather.register_fake
def _(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty((size, *x.shape))


@torch.library.custom_op("onward::horizontal_reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, axis: int, size: int, group: str) -> Tensor:
    """A rank's equal share, along an axis, of the sum over the ranks; without its own gradient."""
    shares = [share.contiguous() for share in x.chunk(size, axis)]
    result = torch.empty_like(shares[0])
    dist.reduce_scatter(result, shares, group=group_named(group))
    return result


@reduce_scatter.register_fake
def _(x: Tensor, axis: int, size: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[axis] //= size
    return x.new_empty(shape)


class EnterRegion(torch.autograd.Function):
    """A full tensor, read by every rank's shard of a region: as it is; its gradients are added up.

    Shoeybi et al., 2019 (Megatron-LM), section 3: the operator f.
    """

    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        """As it is."""
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the group."""
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The sum over the ranks."""
        total: Tensor = all_reduce(gradients[0], "sum", ctx.group)
        return total, None


class LeaveRegion(torch.autograd.Function):
    """Partial sums: added up over the ranks; the gradient goes back as it is (Megatron's operator g)."""

    @staticmethod
    def forward(x: Tensor, group: str) -> Tensor:
        """The sum over the ranks."""
        total: Tensor = all_reduce(x, "sum", group)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """As it is."""
        return gradients[0], None

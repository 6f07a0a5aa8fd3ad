"""Exchanges between the horizontal ranks: sums, maxima, all parts of a tensor; each in both directions of a pass.

The process group is a setting of the process: a process is on one mesh. The exchanges are custom operators of torch, so
that fake tensors and compilers know their shapes without exchanging anything.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_group: dist.ProcessGroup | None = None

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def connect(group: dist.ProcessGroup | None) -> None:
    """From now on collective operators of this process exchange within this group; None: they fail."""
    global _group
    _group = group


def _connected() -> dist.ProcessGroup:
    if _group is None:
        raise RuntimeError(
            "no horizontal process group: call onward.parallel.horizontal.connect(mesh.horizontal) first."
        )
    return _group


@torch.library.custom_op("onward::horizontal_all_reduce", mutates_args=())
def all_reduce(x: Tensor, operation: str) -> Tensor:
    """The sum or the maximum of a tensor over the ranks; without a gradient of its own."""
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, _OPERATIONS[operation], group=_connected())
    return result


@all_reduce.register_fake
def _(x: Tensor, operation: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("onward::horizontal_all_gather", mutates_args=())
def all_gather(x: Tensor, size: int) -> Tensor:
    """The tensors of all ranks, of one shape, stacked: [size, *x.shape]; without a gradient of its own."""
    result = x.new_empty((size, *x.shape))
    dist.all_gather(list(result.unbind(0)), x.contiguous(), group=_connected())
    return result


@all_gather.register_fake
def _(x: Tensor, size: int) -> Tensor:
    return x.new_empty((size, *x.shape))


@torch.library.custom_op("onward::horizontal_reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, axis: int, size: int) -> Tensor:
    """A rank's equal share, along an axis, of the sum over the ranks; without a gradient of its own."""
    shares = [share.contiguous() for share in x.chunk(size, axis)]
    result = torch.empty_like(shares[0])
    dist.reduce_scatter(result, shares, group=_connected())
    return result


@reduce_scatter.register_fake
def _(x: Tensor, axis: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[axis] //= size
    return x.new_empty(shape)


class EnterRegion(torch.autograd.Function):
    """A whole tensor, read by every rank's part of a region: as it is; its gradients are added up.

    Shoeybi et al., 2019 (Megatron-LM), section 3: the operator f.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """As it is."""
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """The sum over the ranks."""
        total: Tensor = all_reduce(gradients[0], "sum")
        return total


class LeaveRegion(torch.autograd.Function):
    """Partial sums: added up over the ranks; the gradient goes back as it is (Megatron's operator g)."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """The sum over the ranks."""
        total: Tensor = all_reduce(x, "sum")
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """As it is."""
        return gradients[0]

"""Process groups by the names that torch has for them, which a program's code can hold, and a sum over one.

A graph's code is text with constants in it, so that a compiler reads it; a group itself is neither.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]


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
    return cast(torch.Tensor, _Sum.apply(tensor, group))  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: str) -> torch.Tensor:
        context.group = group
        return _summed(tensor, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(gradient, context.group), None


def _summed(tensor: torch.Tensor, group: str) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group_named(group))
    return total

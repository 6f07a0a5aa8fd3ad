"""Casts several tensors at once: one kernel and one autograd node for all weights of a segment, not one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What `to(dtype)` gives of each; gradients arrive in the type of the tensor, once all of them are known."""
    if len(tensors) < 2 or not all(type(t) in (Tensor, nn.Parameter) and t.dtype != dtype for t in tensors):
        return tuple(tensor.to(dtype) for tensor in tensors)
    if get_proxy_mode() is not None or torch._C._are_functorch_transforms_active():
        return tuple(tensor.to(dtype) for tensor in tensors)
    found: tuple[Tensor, ...] = _JointCast.apply(dtype, *tensors)  # type: ignore[no-untyped-call]
    return found


class _JointCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return tuple(_copied(tensors, [dtype] * len(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the graph is kept, for derivatives of these
            return None, *(None if g is None else g.to(own) for g, own in zip(gradients, ctx.dtypes, strict=True))
        known = [index for index, gradient in enumerate(gradients) if gradient is not None]
        found: list[Tensor | None] = [None] * len(gradients)
        copies = _copied([gradients[i] for i in known], [ctx.dtypes[i] for i in known])  # type: ignore[misc]
        for index, copy in zip(known, copies, strict=True):
            found[index] = copy
        return None, *found


def _copied(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies

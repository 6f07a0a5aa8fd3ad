"""The norm of all gradients and clipping by it, as torch has them, without sorting tensors by device and type.

torch multiplies by 1 where nothing is to be clipped, so as not to wait for a GPU. A CPU knows the norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """`torch.nn.utils.get_total_norm`, with the same bits."""
    if not _are_alike(gradients):
        return get_total_norm(list(gradients))
    with torch.no_grad():
        return norm_of_all(norm_of_each(gradients))


def norm_of_each(gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The L2 norm of every gradient."""
    return torch._foreach_norm(list(gradients), 2.0)


def norm_of_all(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of gradients whose own norms these are; 0 of none."""
    if not norms:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)  # type: ignore[no-any-return]


def clip(weights: Sequence[torch.nn.Parameter], max_norm: float, norm: torch.Tensor, is_norm_read: bool) -> None:
    """`torch.nn.utils.clip_grads_with_norm_`, with the same bits.

    Args:
        weights: whose gradients are scaled to the norm `max_norm`, if theirs is larger.
        max_norm: of all together.
        norm: theirs.
        is_norm_read: the host knows it already, so that nothing is waited for.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not _are_alike(gradients):
        clip_grads_with_norm_(weights, max_norm, norm)
        return
    with torch.no_grad():
        factor = max_norm / (norm + 1e-6)
        if not (is_norm_read and norm.is_cpu):
            torch._foreach_mul_(gradients, factor.clamp(max=1.0).to(gradients[0].device))
        elif not float(factor) >= 1.0:  # NaN included, as torch passes it on
            torch._foreach_mul_(gradients, factor)


def _are_alike(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether there are any, and all are plain dense tensors of one type on one device."""
    for one in gradients:  # a generator would take twice as long
        if type(one) is not torch.Tensor or one.layout is not torch.strided:
            return False
        if one.dtype is not gradients[0].dtype or one.device != gradients[0].device:
            return False
    return bool(gradients)

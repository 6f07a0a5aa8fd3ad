"""Many small tensors by few kernels: a GPU waits for calls, one for each of a hundred running statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_all(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    """Copies tensors into others of their shapes and types."""
    if source:
        torch._foreach_copy_(list(target), list(source))


def choose(where: torch.Tensor, one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of the first list if `where`, a boolean on their device, is true, else those of the second.

    Both lists hold as many tensors, of the same shapes and types in order.
    """
    chosen = list(other)
    for dtype in {tensor.dtype for tensor in one}:
        places = [place for place, tensor in enumerate(one) if tensor.dtype == dtype]
        first, second = (torch.cat([few[place].flatten() for place in places]) for few in (one, other))
        flat = torch.where(where, first, second)
        for place, part in zip(places, torch.split(flat, [one[place].numel() for place in places]), strict=True):
            chosen[place] = part.view_as(one[place])
    return chosen

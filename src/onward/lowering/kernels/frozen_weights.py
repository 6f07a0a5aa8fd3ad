"""Products whose weight is computed from what is stored, for the product alone and again for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onward.lowering.kernels.rematerialize import recomputed, recomputed_with_gradient


def with_computed_weight(make: Callable[[], Tensor], sources: Sequence[Any], product: Callable[[Tensor], Any]) -> Any:
    """`product(make())`, bit for bit, of a weight without a gradient that is not kept in between.

    Args:
        make: computes the weight.
        sources: what from; a weight that is a view of one of them is kept, since it takes no memory.
        product: multiplies by it, as autocast says.
    """
    device = next(source.device.type for source in sources if isinstance(source, Tensor))
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def make_as_multiplied() -> Tensor:
        made = make()
        # Autocast would keep its own copy until the backward pass.
        return made if low is None or made.dtype is torch.float64 else made.to(low)

    with torch.no_grad():
        weight = make_as_multiplied()
    with recomputed(weight, make_as_multiplied, sources):
        return product(weight)


def with_adapted_weight(
    make: Callable[[Sequence[Any]], Tensor], sources: Sequence[Any], product: Callable[[Tensor], Any]
) -> Any:
    """`product(make(sources))`, bit for bit, of a sum of a weight and its adapter, which is not kept in between.

    Args:
        make: computes the sum.
        sources: what from.
        product: reads it.
    """
    kept = [source.detach() if isinstance(source, Tensor) else source for source in sources]
    device = next(source.device.type for source in kept if isinstance(source, Tensor))
    is_low, low = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def make_again() -> Tensor:
        with torch.autocast(device, low, is_low, cache_enabled=False):
            return make(kept)

    weight = make(sources)
    with recomputed_with_gradient(weight, make_again):
        return product(weight)

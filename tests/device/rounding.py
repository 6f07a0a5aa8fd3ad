"""Whether a device differs from torch by more than rounding does, where a network magnifies rounding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

DRAWS = 11
NUDGE = 2.0**-24
"""Relative to a value: half of what float32 rounds to, so that it stays or becomes a neighbor."""

AS_NEAR = 1.5
"""How many times torch's distance from float64 a device's may be: of two orders of the same sums, either is nearer."""

Batches = list[tuple[Tensor, ...]]
Steps = tuple[Sequence[float], Mapping[str, Any]]


@dataclass(frozen=True)
class RoundingComparison:
    """Distances from torch in float64, relative: medians over batches whose values are nudged by a rounding.

    Attributes:
        device, torch: of the first step's change of weights and statistics, on a device and by torch in float32.
        device_loss, torch_loss: of the loss in any step.
    """

    device: float
    torch: float
    device_loss: float
    torch_loss: float

    @property
    def is_alike(self) -> bool:
        """Whether a device is as near to float64 as torch in float32 is."""
        return self.device <= AS_NEAR * self.torch and self.device_loss <= AS_NEAR * max(self.torch_loss, 1e-7)


def compare_rounding(
    on_device: Callable[[Batches], Steps],
    by_torch: Callable[[Batches, torch.dtype], Steps],
    difference: Callable[[Mapping[str, np.ndarray], Mapping[str, Tensor]], float],
    batches: Batches,
) -> RoundingComparison:
    """Trains on copies of the batches that differ by a rounding.

    A network that normalizes over few values magnifies rounding by 10,000: one comparison is a draw, here are several.

    Args:
        on_device: batches -> losses, and tensors after the first step.
        by_torch: the same, in a type.
        difference: between tensors after the first step and exact ones.
        batches: that both are trained on.
    """
    found: dict[str, list[float]] = {"device": [], "torch": [], "device_loss": [], "torch_loss": []}
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(draw)
        nudged = [tuple(_nudged(x, generator) for x in batch) for batch in batches]
        losses, exact = by_torch(nudged, torch.float64)
        for name, (own, tensors) in {"device": on_device(nudged), "torch": by_torch(nudged, torch.float32)}.items():
            arrays = {key: np.asarray(value) for key, value in tensors.items()}
            found[name].append(difference(arrays, exact))
            distances = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(own, losses, strict=True)]
            found[f"{name}_loss"].append(max(distances))
    return RoundingComparison(**{name: statistics.median(values) for name, values in found.items()})


def _nudged(x: Tensor, generator: torch.Generator) -> Tensor:
    if not x.is_floating_point():
        return x
    return (x.double() * (1 + NUDGE * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1))).to(x)

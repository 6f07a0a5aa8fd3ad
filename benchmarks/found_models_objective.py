"""Something that a found file can learn: a loss on its main output, with targets made from its own outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from benchmarks.found_models_inputs import Array

Kind = Literal["classes", "multi-label", "regression"]
_LEAST = 1e-6
_TINY = 1e-30
"""Far below what a network gives the class that it is surest against, so that its logarithm still has a gradient."""


@dataclass(frozen=True)
class Objective:
    """A loss on one output.

    Attributes:
        kind: classes (the output is probabilities along its last axis), multi-label (each number a probability) or
            regression.
        output: its name.
        index: which output it is.
        target: class numbers, or numbers of the output's shape.
    """

    kind: Kind
    output: str
    index: int
    target: torch.Tensor

    def loss(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean loss of one batch."""
        value = outputs[self.index].float()
        if self.kind == "classes":
            flat = value.reshape(-1, value.shape[-1])
            # Added, not clamped: a clamp has no gradient where a probability underflows. Below 0 it is a log-softmax.
            flat = flat if float(flat.detach().max()) <= 0 else (flat + _TINY).log()
            return torch.nn.functional.nll_loss(flat, self.target.reshape(-1))
        if self.kind == "multi-label":
            return torch.nn.functional.binary_cross_entropy(value * (1 - 2 * _LEAST) + _LEAST, self.target)
        return torch.nn.functional.mse_loss(value, self.target)


def choose_objective(outputs: Sequence[Array], names: Sequence[str]) -> Objective | None:
    """The loss for what the first floating-point output looks like; None: there is none."""
    for index, (value, name) in enumerate(zip(outputs, names, strict=True)):
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and np.isfinite(value).all():
            kind, target = make_target(value)
            return Objective(kind, name, index, torch.from_numpy(target))
    return None


def make_target(value: Array) -> tuple[Kind, Array]:
    """What an output is, and a target for it that its own network can come closer to.

    Classes: the network's own, each renamed to the next one. Probabilities: halved and moved.
    Numbers: shrunk by a third and moved by a third of their deviation.
    """
    value = value.astype(np.float32)
    if value.max() <= 0 and value.ndim > 1 and np.allclose(np.exp(value).sum(-1), 1, atol=1e-3):
        value = np.exp(value)  # a log-softmax
    if value.min() >= 0 and value.max() <= 1 + 1e-4:
        if value.ndim > 1 and value.shape[-1] > 1 and np.allclose(value.sum(-1), 1, atol=1e-3):
            return "classes", ((value.argmax(-1) + 1) % value.shape[-1]).astype(np.int64)
        return "multi-label", np.clip(0.5 * value + 0.1, 0, 1)
    spread = float(value.std()) or 1.0
    return "regression", (value * (2 / 3) + spread / 3).astype(np.float32)

"""Which tensors of a training graph are cast to 16 bits; weights, statistics and gradients of weights stay in fp32."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from onward.engine.network.precision import Precision
from onward.lowering.module import OnnxModule


@dataclass(frozen=True)
class Lowered:
    """Mixed precision of a training graph, as a run has it.

    Attributes:
        precision: of matmuls and convolutions; losses and norms are computed in fp32.
        exact: names of inputs and constants that keep their type.
    """

    precision: Precision
    exact: frozenset[str]

    @classmethod
    def of(cls, net: OnnxModule, precision: Precision, exact: tuple[str, ...] = ()) -> Lowered:
        """What a network keeps: what its loss compares with and weighs by, and weights that are quantized."""
        loss = net.graph.loss_names
        of_loss = () if loss is None else (*loss.labels, *loss.constants)
        return cls(precision, frozenset((*exact, *of_loss, *net.frozen.scales, *net.graph.exact_weights)))

    def constant(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A constant as the graph holds it, finite numbers kept finite."""
        return tensor if name in self.exact else self.precision.lower(tensor)

    def cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A weight or feature as the graph computes with it."""
        is_cast = name not in self.exact and tensor.dtype in (torch.float32, torch.float64)
        return tensor.to(self.precision.dtype) if is_cast else tensor

    def computing(self) -> contextlib.AbstractContextManager[object]:
        """The context of a forward pass."""
        return self.precision.autocast(torch.device("cpu"))

"""The forward and backward passes of an update: one micro-batch after the other, or all of them through a pipeline.

Either way gradients are left at the network's weights, and the mean loss of the update is known on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from onward.data.batches import Batch
from onward.engine.functions import call_loss, features_on
from onward.engine.gradient_reduction import GradientReduction
from onward.engine.inputs.features import FeatureReader
from onward.engine.inputs.loss_normalization import LossNormalization
from onward.engine.network.forward import Forward
from onward.parallel.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class Computed:
    """What became of one or several micro-batches.

    Attributes:
        loss_sum: of their losses, on the device; this replica's share of them.
        losses: how many.
        outputs: values of the last of them by name.
    """

    loss_sum: torch.Tensor
    losses: int
    outputs: Mapping[str, Any]


class MicroBatches(Protocol):
    """Computes gradients, micro-batch by micro-batch."""

    def add(self, batch: Batch, is_last: bool, scale: float) -> Computed | None:
        """Takes the next micro-batch of an update.

        Args:
            batch: this replica's.
            is_last: of its update; when this returns, all gradients of the update are there.
            scale: what losses are multiplied by before the backward pass.

        Returns:
            What was computed meanwhile; None: nothing yet.
        """


class SequentialMicroBatches:
    """Forward and backward as soon as a micro-batch comes, or all of an update where each weighs by what all count."""

    def __init__(
        self,
        forward: Forward,
        shares: LossNormalization,
        reduction: GradientReduction,
        backward: Callable[[torch.Tensor], None] = torch.autograd.backward,
    ) -> None:
        self.forward = forward
        self.shares = shares
        self.reduction = reduction
        self._backward = backward
        self._waiting: list[Batch] = []

    def add(self, batch: Batch, is_last: bool, scale: float) -> Computed | None:
        """See `MicroBatches.add`."""
        self._waiting.append(batch)
        if self.shares.spans_update and not is_last:
            return None
        waiting, self._waiting = self._waiting, []
        losses, outputs = list[torch.Tensor](), dict[str, Any]()
        for one, factors in zip(waiting, self.shares.of(waiting), strict=True):
            outputs.clear()  # before the next are computed: they may be large
            features = self.forward.reader.to_tensors(one.features, one.origin)
            if self.forward.network.compilation is not None:
                self.forward.network.compilation.begin_pass()
            with self.reduction.micro_batch(self.forward.module, is_last and one is waiting[-1]):
                outputs |= self.forward(features)
                loss = self._loss(one, features, outputs, factors)
                self._backward(loss if scale == 1.0 else loss * scale)
            losses.append(loss.detach())
        return Computed(functools.reduce(torch.add, losses), len(losses), outputs)

    def _loss(
        self,
        batch: Batch,
        features: Mapping[str, torch.Tensor],
        outputs: Mapping[str, Any],
        factors: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.shares.function is None:
            return shared_loss(outputs, self.shares.names, factors)
        known = features_on(self.forward.reader.device, batch.features, features)
        loss = call_loss(self.shares.function, {name: outputs[name] for name in self.shares.names}, known)
        return loss if factors is None else loss * factors[0]


SHARES = "onward/loss shares"
"""Under this name the factors of a micro-batch's losses travel with its features to the last stage."""


class PipelinedMicroBatches:
    """Keeps micro-batches until all of an update are there, and passes them through the stages."""

    def __init__(self, pipeline: Pipeline, reader: FeatureReader, shares: LossNormalization) -> None:
        self.pipeline = pipeline
        self.reader = reader
        self.shares = shares
        self._waiting: list[tuple[Batch, dict[str, torch.Tensor]]] = []

    def add(self, batch: Batch, is_last: bool, scale: float) -> Computed | None:
        """See `MicroBatches.add`."""
        # On their way to the device while the next micro-batch is read.
        self._waiting.append((batch, self.reader.to_tensors(batch.features, batch.origin)))
        if not is_last:
            return None
        batches, features = zip(*self._waiting, strict=True)
        self._waiting = []
        for tensors, factors in zip(features, self.shares.of(batches), strict=True):
            tensors |= {} if factors is None else {SHARES: factors}
        losses = self.pipeline.run(features, torch.full((len(batches),), scale, device=self.reader.device))
        return Computed(losses.sum(), len(batches), {})


def shared_loss(outputs: Mapping[str, Any], names: tuple[str, ...], factors: torch.Tensor | None) -> torch.Tensor:
    """The loss of a micro-batch as this replica is to minimize it: the weighed sum of the named values, in fp32."""
    # A loss that the model computes itself may be in 16 bits, where the loss scale would overflow.
    losses = [outputs[name].float() for name in names]
    if factors is not None:
        # A micro-batch that counts no label has a loss of 0/0, which is to count for nothing.
        losses = [
            torch.where(factor == 0, 0.0, loss * factor) for loss, factor in zip(losses, factors.unbind(), strict=True)
        ]
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

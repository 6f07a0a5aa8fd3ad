"""Networks cut into pipeline stages: what a stage computes of a micro-batch, and evaluation through all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onward.engine.inputs.features import FeatureReader
from onward.engine.micro_batches import SHARES, shared_loss
from onward.engine.network.forward import Forward
from onward.engine.network.network import Network
from onward.engine.network.precision import Precision
from onward.graph.losses.spec import LossNames
from onward.lowering.program import Program
from onward.parallel.pipeline.pipeline import Pipeline
from onward.parallel.pipeline.stage import MINIMIZED


class StageCompute:
    """Values of one stage by name, from what it received and its part of the features.

    Args:
        network: of the stage.
        precision: of the pass.
        loss: of the graph, on the last stage; None elsewhere.
        received: names of what arrives from the stage before, in the type that it was computed in.
    """

    def __init__(self, network: Network, precision: Precision, loss: LossNames | None, received: Sequence[str]) -> None:
        self.received = tuple(received)
        self.network = network
        self.precision = precision
        self.loss = loss
        self._shares: tuple[str, ...] = ()
        self._instrument: Callable[[Program], Program] | None = None
        self._forwards: dict[tuple[str, ...], Forward] = {}

    def begin_round(self, shares: tuple[str, ...], instrument: Callable[[Program], Program] | None) -> None:
        """Takes what may differ from round to round.

        Args:
            shares: values whose weighted sum is the loss, where replicas' losses are weighted.
            instrument: gives the program to call instead of one; None: none.
        """
        self._shares, self._instrument = shares, instrument

    def __call__(self, values: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, Any]:
        """The values, and the loss that is minimized where its factors came with the features."""
        factors = values.get(SHARES)
        if self.loss is None or factors is None:
            return self._compute(values, names)
        found = self._compute(values, tuple(dict.fromkeys((*names, *self._shares))))
        return {**found, MINIMIZED: shared_loss(found, self._shares, factors)}

    def _compute(self, values: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, Any]:
        if not names:
            return {}
        if names not in self._forwards:
            self._forwards[names] = Forward(
                self.network, names, self.precision, instrument=self._instrumented, exact=self.received
            )
        return self._forwards[names](values)

    def _instrumented(self, program: Program) -> Program:
        # Evaluation, and the pass that finds out the shapes of what travels, are no micro-batch of an update.
        if self._instrument is None or not torch.is_grad_enabled():
            return program
        return self._instrument(program)


class PipelinedForward:
    """Values of the entire network by name, through all stages, on every rank; for evaluation."""

    def __init__(self, pipeline: Pipeline, reader: FeatureReader, outputs: Sequence[str]) -> None:
        self.pipeline = pipeline
        self.reader = reader
        self.outputs = tuple(outputs)

    def __call__(self, features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs of one batch."""
        return self.pipeline.evaluate(features, self.outputs)

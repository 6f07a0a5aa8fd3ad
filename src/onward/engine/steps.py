"""Two of the three step modes: accumulate gradients, update the weights. `evaluation` holds the third."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_

from onward.data.batches import Batch
from onward.engine.exchange import GradientExchange
from onward.engine.forward import Forward
from onward.engine.loss_shares import LossShares
from onward.engine.state import TrainState
from onward.optim.building import set_learning_rate


@dataclass(frozen=True)
class UpdateResult:
    """What a weight update tells.

    Attributes:
        gradient_norm: global L2 norm of the mean gradient before clipping, loss scale taken out.
        finite: whether all gradients were; if not, weights, moments and running statistics are as before.
        tensors: copies of the weights and gradients that were asked for by name, and graph values.
    """

    gradient_norm: float
    finite: bool
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class WatchedNames:
    """Which tensors a report is to hold: patterns of weights and gradients, and names of graph values."""

    patterns: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    def select(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the weights, and of their gradients as `<weight>_grad`, that a pattern matches."""
        found = {}
        for name, weight in weights.items():
            if self._matches(name):
                found[name] = weight.detach().clone()
            if weight.grad is not None and self._matches(f"{name}_grad"):
                found[f"{name}_grad"] = weight.grad.detach().clone()
        return found

    def _matches(self, name: str) -> bool:
        return any(name == pattern or fnmatchcase(name, pattern) for pattern in self.patterns)


class Steps:
    """The step modes over one train state.

    Args:
        state: whose weights, moments and loss scale change.
        forward: computes the values that are minimized first, then watched values of the graph.
        shares: how much this replica's losses weigh.
        gradient_accumulation_steps: micro-batches whose mean gradient makes an update.
        max_norm_clip: the global gradient norm is clipped to this; None: no clipping.
        watched: tensors that reports are to hold.
        distribution: how the gradients of several ranks become one.
    """

    def __init__(
        self,
        state: TrainState,
        forward: Forward,
        shares: LossShares,
        gradient_accumulation_steps: int,
        max_norm_clip: float | None,
        watched: WatchedNames,
        distribution: GradientExchange,
    ) -> None:
        self.state = state
        self.forward = forward
        self.shares = shares
        self.accumulation = gradient_accumulation_steps
        self.max_norm_clip = max_norm_clip
        self.watched = watched
        self.distribution = distribution
        self._loss_sum: torch.Tensor | None = None
        self._losses = 0

    def accumulate(self, batch: Batch, is_last: bool = False) -> dict[str, Any]:
        """GradientAccumulateStep: forward and backward; returns the outputs by name."""
        features = self.forward.to_tensors(batch.features)
        factors = self.shares.of(batch.features, batch.sample_count)
        with self.distribution.micro_batch(self.forward.module, is_last):
            outputs = self.forward(features)
            # A loss that the model computes itself may be in 16 bits, where the loss scale would overflow.
            losses = [outputs[name].float() for name in self.shares.names]
            if factors is not None:
                losses = [loss * factor for loss, factor in zip(losses, factors.unbind(), strict=True)]
            loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
            factor = self._scale / self.accumulation
            torch.autograd.backward(loss if factor == 1.0 else loss * factor)
        self._add_loss(loss.detach(), 1)
        return outputs

    def update(self, batch: Batch, learning_rate: float, watch: bool) -> UpdateResult:
        """ModelUpdateStep: forward, backward, unscale, clip, update; a gradient that is not finite skips the update."""
        outputs = self.accumulate(batch, is_last=True)
        gradients = self.distribution.finish(self.state)
        if self._scale != 1.0:
            torch._foreach_mul_(list(gradients.values()), 1.0 / self._scale)
        norm = self.distribution.total_norm(self.state, gradients)
        gradient_norm = float(norm)
        finite = gradient_norm - gradient_norm == 0.0
        tensors = self._watched_tensors(outputs) if watch else {}
        if finite:
            if self.max_norm_clip is not None:
                clip_grads_with_norm_(self.state.parameters.values(), self.max_norm_clip, norm)
            set_learning_rate(self.state.optimizer, learning_rate)
            self.state.optimizer.step()
            for weight in self.state.weights.values():
                weight.update_followers()
            self.distribution.average_statistics(self.state)
        else:
            self.state.counters.skipped_updates += 1
            # What overflowed the gradients has most often reached the running statistics too, and would stay there.
            self.state.restore_statistics()
        self.state.drop_gradients()
        if self.state.loss_scale is not None:
            self.state.loss_scale = self.state.loss_scale.after(finite)
        self.state.counters.update += 1
        return UpdateResult(gradient_norm, finite, tensors)

    def take_mean_loss(self) -> float:
        """The mean loss over the micro-batches and replicas since this was called last."""
        assert self._loss_sum is not None
        total = self.distribution.sum_over_replicas(self._loss_sum)
        mean = float(total) / (self._losses * self.state.mesh.topology.data_size)
        self._loss_sum, self._losses = None, 0
        return mean

    @property
    def _scale(self) -> float:
        return 1.0 if self.state.loss_scale is None else self.state.loss_scale.scale

    def _add_loss(self, loss: torch.Tensor, count: int) -> None:
        # Summed on the device: reading it is left to the report, so that no step waits for the device.
        self._loss_sum = loss.double() if self._loss_sum is None else self._loss_sum + loss
        self._losses += count

    def _watched_tensors(self, outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        values = {name: outputs[name].detach() for name in self.watched.values if name in outputs}
        return {**values, **self.watched.select(self.state.parameters)}

"""Two of the three step modes: accumulate gradients, update the weights. `evaluation` holds the third."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from onward.engine.forward import Forward
from onward.engine.state import TrainState
from onward.optim.building import set_learning_rate


@dataclass(frozen=True)
class UpdateResult:
    """What a weight update tells.

    Attributes:
        loss: of its last micro-batch, on the device.
        gradient_norm: global L2 norm of the mean gradient before clipping, loss scale taken out.
        finite: whether all gradients were; if not, weights, moments and running statistics are as before.
        tensors: copies of the weights and gradients that were asked for by name, and graph values.
    """

    loss: torch.Tensor
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
        forward: computes the loss first, then watched values of the graph.
        gradient_accumulation_steps: micro-batches whose mean gradient makes an update.
        max_norm_clip: the global gradient norm is clipped to this; None: no clipping.
        watched: tensors that reports are to hold.
    """

    def __init__(
        self,
        state: TrainState,
        forward: Forward,
        gradient_accumulation_steps: int,
        max_norm_clip: float | None,
        watched: WatchedNames,
    ) -> None:
        self.state = state
        self.forward = forward
        self.accumulation = gradient_accumulation_steps
        self.max_norm_clip = max_norm_clip
        self.watched = watched
        self._weights = dict(state.net.weights.items())

    def accumulate(self, features: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """GradientAccumulateStep: forward and backward; returns the loss and the outputs by name."""
        outputs = self.forward(self.forward.to_tensors(features))
        # A loss that the model computes itself may be in 16 bits, where the loss scale would overflow.
        loss: torch.Tensor = outputs[self.forward.outputs[0]].float()
        scale = 1.0 if self.state.loss_scale is None else self.state.loss_scale.scale
        factor = scale / self.accumulation
        torch.autograd.backward(loss if factor == 1.0 else loss * factor)
        return loss.detach(), outputs

    def update(self, features: Mapping[str, Any], learning_rate: float, watch: bool) -> UpdateResult:
        """ModelUpdateStep: forward, backward, unscale, clip, update; a gradient that is not finite skips the update."""
        loss, outputs = self.accumulate(features)
        gradients = [weight.grad for weight in self._weights.values() if weight.grad is not None]
        scale = 1.0 if self.state.loss_scale is None else self.state.loss_scale.scale
        if scale != 1.0:
            torch._foreach_mul_(gradients, 1.0 / scale)
        norm = get_total_norm(gradients)
        gradient_norm = float(norm)
        finite = gradient_norm - gradient_norm == 0.0
        tensors = self._watched_tensors(outputs) if watch else {}
        if finite:
            if self.max_norm_clip is not None:
                clip_grads_with_norm_(self._weights.values(), self.max_norm_clip, norm)
            set_learning_rate(self.state.optimizer, learning_rate)
            self.state.optimizer.step()
        else:
            self.state.counters.skipped_updates += 1
            # What overflowed the gradients has most often reached the running statistics too, and would stay there.
            self.state.restore_statistics()
        self.state.optimizer.zero_grad(set_to_none=True)
        if self.state.loss_scale is not None:
            self.state.loss_scale = self.state.loss_scale.after(finite)
        self.state.counters.update += 1
        return UpdateResult(loss, gradient_norm, finite, tensors)

    def _watched_tensors(self, outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        values = {name: outputs[name].detach() for name in self.watched.values if name in outputs}
        return {**values, **self.watched.select(self._weights)}

"""Two of the three step modes: accumulate gradients, update the weights. `evaluation` holds the third."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from onward.data.batches import Batch
from onward.engine.gradient_norm import clip
from onward.engine.gradient_reduction import GradientReduction
from onward.engine.micro_batches import MicroBatches
from onward.engine.state import TrainState
from onward.engine.unfreezing import NEVER_FROZEN, Unfreezing
from onward.engine.update_in_backward import UpdateInBackward
from onward.graph.weights.names import WeightNames
from onward.optim.building import is_fused, set_learning_rate
from onward.optim.direct_step import take_step
from onward.parallel.gathering import gather_full


@dataclass(frozen=True)
class UpdateResult:
    """What a weight update tells.

    Attributes:
        norm: global L2 norm of the mean gradient before clipping, loss scale taken out; on the device. Where it is not
            finite, weights, moments and running statistics are as before; also where these statistics overflowed.
        loss: mean over this replica's micro-batches of the update, on the device.
        tensors: copies of the weights and gradients that were asked for by name, and graph values.
    """

    norm: torch.Tensor
    loss: torch.Tensor
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def gradient_norm(self) -> float:
        """The norm as a number; waits for the device."""
        return float(self.norm)


@dataclass(frozen=True)
class WatchedNames:
    """Which tensors a report is to hold: patterns of weights and gradients, and names of graph values."""

    patterns: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    known_as: WeightNames = field(default_factory=WeightNames)

    def select(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of the weights, and of their gradients as `<weight>_grad`, that a pattern matches."""
        found = {}
        gradients = self.known_as.of_gradients()
        for name, weight in weights.items():
            if self.known_as.matches(name, self.patterns):
                found[name] = weight.detach().clone()
            if weight.grad is not None and gradients.matches(f"{name}_grad", self.patterns):
                found[f"{name}_grad"] = weight.grad.detach().clone()
        return found

    def module_paths(self, names: Iterable[str]) -> dict[str, str]:
        """Where weights and gradients of these names belong, as far as it is known."""
        paths = {**self.known_as.paths, **self.known_as.of_gradients().paths}
        return {name: paths[name] for name in names if name in paths}


def skips_on_device(state: TrainState) -> bool:
    """Whether an update that overflowed is skipped without the host's knowing: it has no need to wait for the device.

    On a CPU nothing waits. A dynamic loss scale must be known before the next step, and LAMB asks the host.
    """
    if state.device.type == "cpu" or (state.loss_scale is not None and state.loss_scale.dynamic):
        return False
    return is_fused(state.optimizer)


class Steps:
    """The step modes over one train state.

    Args:
        state: whose weights, moments and loss scale change.
        micro_batches: compute gradients.
        gradient_accumulation_steps: micro-batches that make an update.
        max_norm_clip: the global gradient norm is clipped to this; None: no clipping.
        watched: tensors that reports are to hold.
        reduction: how the gradients of several ranks become one.
        loss_is_sum: losses are sums over samples; reports give them a sample, as evaluation does.
        unfreezing: which weights are frozen for so long.
        adds_micro_batches: the gradient of an update is the sum over its micro-batches, not the mean.
        in_backward: updates the weights inside the backward pass of `micro_batches`; None: they are updated after it.
        report_missing: called once, after the first update, with the weights that got no gradient, if any.
    """

    def __init__(
        self,
        state: TrainState,
        micro_batches: MicroBatches,
        gradient_accumulation_steps: int,
        max_norm_clip: float | None,
        watched: WatchedNames,
        reduction: GradientReduction,
        report_missing: Callable[[Sequence[str]], None] | None = None,
        loss_is_sum: bool = False,
        unfreezing: Unfreezing = NEVER_FROZEN,
        adds_micro_batches: bool = False,
        in_backward: UpdateInBackward | None = None,
    ) -> None:
        self.state = state
        self._in_backward = in_backward
        self._unfreezing = unfreezing
        self._loss_is_sum = loss_is_sum
        self._report_missing = report_missing
        self.micro_batches = micro_batches
        self.accumulation = gradient_accumulation_steps
        self._share = 1 if adds_micro_batches else gradient_accumulation_steps
        self.max_norm_clip = max_norm_clip
        self.watched = watched
        self.reduction = reduction
        self._loss_sum: torch.Tensor | None = None
        self._losses = 0
        self._update_sum: torch.Tensor | None = None
        self._update_losses = 0

    def accumulate(self, batch: Batch, is_last: bool = False) -> Mapping[str, Any]:
        """GradientAccumulateStep: forward and backward; returns what outputs there are by name."""
        self._unfreezing.before_pass(self.state.counters.update, self.state.weights)
        computed = self.micro_batches.add(batch, is_last, self._scale / self._share)
        if self._loss_is_sum:
            self._update_losses += batch.sample_count * self.state.mesh.topology.readers_of_worker
        if computed is None:
            return {}
        # Summed on the device: reading it is left to the report, so that no step waits for the device.
        loss = computed.loss_sum
        self._update_sum = loss.double() if self._update_sum is None else self._update_sum + loss
        self._update_losses += 0 if self._loss_is_sum else computed.losses
        return computed.outputs

    def update(self, batch: Batch, learning_rate: float, watch: bool, is_last: bool = False) -> UpdateResult:
        """ModelUpdateStep: forward, backward, unscale, clip, update; the last of a round or not.

        Gradients, running statistics or a loss that overflowed skip the update, on all ranks alike.
        """
        if self._in_backward is not None:
            return self._update_in_backward(self._in_backward, batch, learning_rate, watch, is_last)
        outputs = self.accumulate(batch, is_last=True)
        gradients = self.reduction.finish(self.state)
        frozen = self._unfreezing.frozen(self.state.counters.update)
        for name in frozen & self.state.weights.keys():
            gradients.pop(name, None)
            self.state.weights[name].drop_gradient()
        self._look_for_missing(gradients.keys() | frozen)
        if gradients and self._scale != 1.0:
            torch._foreach_mul_(list(gradients.values()), 1.0 / self._scale)
        assert self._update_sum is not None
        norm, checked = self.reduction.checked_norm(self.state, gradients, self._update_sum)
        tensors = self._watched_tensors(outputs) if watch else {}
        set_learning_rate(self.state.optimizer, learning_rate)
        if skips_on_device(self.state):
            self._update_unless_overflowed(norm, checked)
        else:
            self._update_if_finite(norm, checked)
        gradients.clear()
        self.state.drop_gradients()
        self.state.counters.update += 1
        self.state.after_update(is_last)
        return UpdateResult(norm, self._take_loss_of_update(), tensors)

    def _update_in_backward(
        self, in_backward: UpdateInBackward, batch: Batch, learning_rate: float, watch: bool, is_last: bool
    ) -> UpdateResult:
        """The same where the weights have been updated when the backward pass is done."""
        on_device = skips_on_device(self.state)
        in_backward.prepare(learning_rate, self.watched.select if watch else None, on_device)
        outputs = self.accumulate(batch, is_last=True)
        done = in_backward.finish()
        self._look_for_missing(done.updated | self._unfreezing.frozen(self.state.counters.update))
        tensors = dict[str, torch.Tensor]()
        if watch:
            others = {name: one for name, one in self.state.torch_parameters.items() if name not in done.updated}
            values = self.reduction.watched_values(outputs, self.watched.values)
            tensors = {**values, **done.tensors, **self.watched.select(others)}
        if on_device:
            self.state.restore_statistics(done.overflowed)
            self.state.count_skipped_later(done.overflowed)
        elif bool(done.overflowed):
            self.state.counters.skipped_updates += 1
            self.state.restore_statistics()
        self.state.counters.update += 1
        self.state.after_update(is_last)
        return UpdateResult(done.norm, self._take_loss_of_update(), tensors)

    def _look_for_missing(self, gradients: Collection[str]) -> None:
        if self._report_missing is not None:
            missing = [name for name in self.state.weights if name not in gradients]
            if missing:
                self._report_missing(missing)
            self._report_missing = None

    def _take_loss_of_update(self) -> torch.Tensor:
        assert self._update_sum is not None
        total, losses = self._update_sum, self._update_losses
        self._loss_sum = total if self._loss_sum is None else self._loss_sum + total
        self._losses += losses
        self._update_sum, self._update_losses = None, 0
        return total if losses == 1 else total / losses

    def _update_if_finite(self, norm: torch.Tensor, checked: torch.Tensor) -> None:
        """Reads the norm, and changes the weights or does not."""
        finite = math.isfinite(float(checked))
        if finite:
            self._change_weights(norm, is_norm_read=True)
            self.reduction.average_statistics(self.state)
        else:
            self.state.counters.skipped_updates += 1
            # What overflowed the gradients has most often reached the running statistics too, and would stay there.
            self.state.restore_statistics()
        scale = self.state.loss_scale
        if scale is not None and (finite or not (scale.dynamic and math.isfinite(float(norm)))):
            # Where the statistics or the loss overflowed and the gradients did not, another scale would not help.
            self.state.loss_scale = scale.after(finite)

    def _update_unless_overflowed(self, norm: torch.Tensor, checked: torch.Tensor) -> None:
        """The same without waiting: the device itself leaves everything as it was, and whether it did is read later."""
        overflowed = checked.isfinite().logical_not()
        # What torch's gradient scaler tells fused optimizers; their step counts go back, too.
        self.state.optimizer.found_inf = overflowed.float()  # type: ignore[attr-defined]
        self._change_weights(norm, is_norm_read=False)
        self.reduction.average_statistics(self.state)
        self.state.restore_statistics(overflowed)
        self.state.count_skipped_later(overflowed)

    def _change_weights(self, norm: torch.Tensor, is_norm_read: bool) -> None:
        if self.max_norm_clip is not None:
            clip(list(self.state.torch_parameters.values()), self.max_norm_clip, norm, is_norm_read)
        take_step(self.state.optimizer)
        for weight in self.state.weights.values():
            weight.update_followers()

    def take_mean_loss(self) -> float:
        """The mean loss over the micro-batches and replicas since this was called last."""
        assert self._loss_sum is not None
        mean = self.reduction.mean_over_replicas(self._loss_sum, self._losses)
        self._loss_sum, self._losses = None, 0
        return mean

    @property
    def _scale(self) -> float:
        return 1.0 if self.state.loss_scale is None else self.state.loss_scale.scale

    def _watched_tensors(self, outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Whole tensors, where ranks hold parts of them on rank 0 alone."""
        values = self.reduction.watched_values(outputs, self.watched.values)
        if self.state.mesh.world_size == 1:
            return {**values, **self.watched.select(self.state.torch_parameters)}
        if not self.watched.patterns:
            return values
        tensors = {
            name: self.state.weights[name.removesuffix("_grad")].shared_like(tensor)
            for name, tensor in self.watched.select(self.state.torch_parameters).items()
        }
        return {**values, **gather_full(self.state.mesh, tensors)}

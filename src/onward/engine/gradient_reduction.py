"""How the gradients, losses and statistics of several ranks become one, as the settings of the run say.

In a world of one process everything here is the plain thing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onward.engine.gradient_norm import total_norm
from onward.engine.state import TrainState
from onward.parallel import data_parallel, gradients
from onward.parallel.launch.process import Mesh
from onward.parallel.pipeline.pipeline import Pipeline
from onward.parameters.distributed import Distributed


@dataclass(frozen=True, kw_only=True)
class GradientReduction:
    """What ranks reduce around an update.

    Attributes:
        mesh: the ranks.
        distributed: section `distributed`.
        experts: weights of experts that replicas share.
        partial: weights whose gradients are sums over the tensor-parallel ranks.
        pipeline: where there is one.
        replicas_are_wrapped: whether an engine averages over the replicas during the backward pass.
        counts: how many ranks hold each weight, kept on the device.
    """

    mesh: Mesh
    distributed: Distributed
    partial: Sequence[str] = ()
    experts: Collection[str] = frozenset()
    pipeline: Pipeline | None = None
    replicas_are_wrapped: bool = True
    counts: gradients.CountsOnDevice = field(default_factory=gradients.CountsOnDevice)

    def micro_batch(self, module: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Around the forward and backward pass of a micro-batch, the last of its update or not."""
        return data_parallel.micro_batch(module, self.distributed.zero_stage, is_last)

    def finish(self, state: TrainState) -> dict[str, torch.Tensor]:
        """Takes the gradients of all backward passes, and reduces them over the ranks; weight -> gradient of this
        rank's shard.
        """
        if self.pipeline is not None:
            self.pipeline.sum_shared_gradients()
        found = {
            name: gradient for name, weight in state.weights.items() if (gradient := weight.take_gradient()) is not None
        }
        if self.mesh.world_size > 1:
            gradients.finish_gradients(
                self.mesh,
                found,
                partial=self.partial,
                replicated={name: shards for name in found if (shards := state.weights[name].replicated_shards)},
                not_reduced=self._not_reduced(state),
                experts=[name for name in state.weights if name in self.experts],
                enable_adasum=self.distributed.enable_adasum,
            )
        return found

    def _not_reduced(self, state: TrainState) -> list[str]:
        """ZeRO shares out along axis 0; a weight that is a single number has none."""
        others = {name: weight for name, weight in state.weights.items() if name not in self.experts}
        if not self.replicas_are_wrapped:
            return list(others)
        return [name for name, weight in others.items() if self.distributed.zero_stage and not weight.full_shape]

    def total_norm(self, state: TrainState, found: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The L2 norm of the gradients of all weights, on every rank of a worker the same."""
        if self.mesh.world_size == 1:
            return total_norm(list(found.values()))
        return gradients.total_norm(self.mesh, self._counted(state, found), self._copies(state, found))

    def _counted(self, state: TrainState, found: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [state.weights[name].counted(gradient) for name, gradient in found.items()]

    def _copies(self, state: TrainState, found: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.counts(self.mesh.device, tuple(state.weights[name].copies for name in found))

    def checked_norm(
        self, state: TrainState, found: Mapping[str, torch.Tensor], loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`total_norm`, and the same again, but infinite where running statistics or the loss overflowed on any rank.

        Args:
            state: with the statistics of the update's forward passes.
            found: weight -> gradient.
            loss: of this rank's micro-batches. NaN is no overflow: a batch in which no label counts has the loss 0/0,
                and gradients of zero.
        """
        replicas = self.mesh.topology.worker_size
        # Statistics are added up over replicas before they are divided.
        checked = [tensor for tensor in state.statistics().values() if tensor.is_floating_point()]
        if replicas > 1 and checked:
            checked = list(torch._foreach_mul(checked, replicas))
        if self.mesh.world_size == 1:
            norm = total_norm(list(found.values()))
            if not checked and type(loss) is torch.Tensor and loss.is_cpu:
                return norm, norm.new_full((), math.inf) if math.isinf(loss.item()) else norm
        checked.append(torch.where(loss.isinf(), torch.inf, 0.0))
        if self.mesh.world_size == 1:
            overflowed = gradients.count_not_finite(norm.device, checked) > 0
            return norm, torch.where(overflowed, torch.inf, norm)
        return gradients.checked_norm(self.mesh, self._counted(state, found), self._copies(state, found), checked)

    def watched_values(self, outputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Values of the last micro-batch of an update, on every rank of a pipeline those of all its stages."""
        if self.pipeline is not None:
            return self.pipeline.watched_values(names)
        return {name: outputs[name].detach() for name in names if name in outputs}

    def average_statistics(self, state: TrainState) -> None:
        """Every replica normalized with its own batch; what they continue with is the mean of what they saw."""
        if not self.distributed.synchronize_batch_norm:
            data_parallel.average(list(state.statistics().values()), self.mesh.data)

    def mean_over_replicas(self, total: torch.Tensor, count: int) -> float:
        """What all replicas' totals are divided by all their counts; they may count different numbers of samples."""
        if self.mesh.replicas is None:
            return float(total) / count
        of_all, counted = self.sum_over_replicas(torch.stack((total, torch.full_like(total, count)))).tolist()
        return float(of_all / counted)

    def sum_over_replicas(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all replicas."""
        return gradients.sum_over_group(self.mesh.replicas, numbers)

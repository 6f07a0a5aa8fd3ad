"""How much a micro-batch weighs in the loss of all micro-batches of an update, those of all replicas included.

A loss that is a mean over labels or samples is, over the union of several batches, not the mean of their losses where
they count different numbers of labels; then every loss is weighed by what its micro-batch counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from onward.data.batches import Batch
from onward.graph.losses.spec import LossNames
from onward.losses.labels import LabelCount
from onward.losses.registry import loss_named
from onward.parallel.gradients import sum_over_group
from onward.parallel.launch.process import Mesh
from onward.parameters import Loss, Training


class LossNormalization:
    """Weighs the losses of micro-batches.

    Attributes:
        names: the values whose weighed sum is to be minimized: the loss, or the parts it is the sum of; or the outputs
            of the model that `function` computes it from.
        function: the user's own; None: the loss is in the graph.
        spans_update: a micro-batch is weighed by what all micro-batches of its update count.
    """

    def __init__(
        self, mesh: Mesh, settings: Loss, loss: LossNames, training: Training, batches_may_differ: bool
    ) -> None:
        self.mesh = mesh
        self._is_sum = settings.reduction == "sum"
        self._means = (*loss_named(settings.type).normalizer(settings), *([None] if loss.addends else []))
        is_one_batch = training.gradient_accumulation_steps > 1 and training.accumulate_as == "one_batch"
        differ = batches_may_differ or any(labels is not None and not labels.is_constant for labels in self._means)
        self._is_counted = (mesh.data is not None or is_one_batch) and not self._is_sum and differ
        self.spans_update = is_one_batch and self._is_counted
        is_divided = self._is_counted and len(self._means) > 1
        self.names = (loss.addends or loss.parts) if is_divided else loss.computed
        self.function = settings.function

    def of(self, batches: Sequence[Batch]) -> list[torch.Tensor] | list[None]:
        """What each of `names` is multiplied by in micro-batches of this replica: all of an update if weights span it.

        So weighed, the mean over the replicas of a worker, and over the micro-batches of an update, is the loss of the
        union.

        Returns:
            For each micro-batch one factor for each name; None: all are 1.
        """
        size = self.mesh.topology.worker_size
        if self._is_sum and self.mesh.data is not None:
            # Ranks that share sequences all have the loss of the same samples.
            return [
                torch.full((len(self.names),), float(self.mesh.topology.readers_of_worker), device=self.mesh.device)
            ] * len(batches)
        if not self._is_counted:
            return [None] * len(batches)
        counts = torch.tensor([self._counts(batch) for batch in batches], dtype=torch.float64)
        own = counts.to(self.mesh.device, non_blocking=True)
        total = sum_over_group(self.mesh.data, own.sum(0, keepdim=True) if self.spans_update else own)
        share = own * (size * len(batches) if self.spans_update else size) / total
        # Where nothing is counted anywhere, every loss is 0/0 or 0, and stays what it is.
        return list(torch.where(total > 0, share, torch.ones_like(own)).float())

    def _counts(self, batch: Batch) -> list[float]:
        return [
            float(batch.sample_count) if one is None or one.is_constant else _count(batch.features, one)
            for one in self._means
        ]


def _count(features: Mapping[str, Any], counted: LabelCount) -> float:
    """What a mean over labels divides by: how many count, or the sum of their classes' weights."""
    labels = features[counted.feature]
    array = labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    array = array.reshape(-1) if counted.ignored is None else array[array != counted.ignored]
    if counted.class_weights is None:
        return float(array.size)
    return float(np.asarray(counted.class_weights, dtype=np.float64)[array].sum())

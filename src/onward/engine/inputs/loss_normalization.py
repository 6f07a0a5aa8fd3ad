"""How much a replica's micro-batch weighs in the loss of all replicas' micro-batches together.

A loss that is a mean over labels or samples is, over the union of several batches, not the mean of their losses where
they count different numbers of labels; then every replica's loss is weighed by what it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from onward.graph.losses.spec import LossNames
from onward.parallel.gradients import sum_over_replicas
from onward.parallel.launch.process import Mesh
from onward.parameters import Loss


class LossNormalization:
    """Weighs the losses of one micro-batch.

    Attributes:
        names: the values whose weighed sum is to be minimized: the loss, or the parts it is the sum of; or the outputs
            of the model that `function` computes it from.
        function: the user's own; None: the loss is in the graph.
    """

    def __init__(self, mesh: Mesh, settings: Loss, loss: LossNames, batches_may_differ: bool) -> None:
        self.mesh = mesh
        self._settings = settings
        self._labels_count = settings.type == "bert" or (
            settings.type == "softmax_cross_entropy"
            and not settings.dense_labels
            and (settings.ignore_index is not None or settings.class_weights is not None)
        )
        self._is_counted = (
            mesh.data is not None and settings.reduction == "mean" and (self._labels_count or batches_may_differ)
        )
        self.names = loss.parts if self._is_counted and settings.type == "bert" else loss.computed
        self.function = settings.function

    def of(self, features: Mapping[str, Any], samples: int) -> torch.Tensor | None:
        """What each of `names` is multiplied by, so that the mean over the replicas is the loss of the union.

        Args:
            features: of this replica's micro-batch.
            samples: how many there are in it.

        Returns:
            One factor for each name; None: all are 1.
        """
        if self.mesh.data is None:
            return None
        size = self.mesh.topology.data_size
        if self._settings.reduction == "sum":
            return torch.full((len(self.names),), float(size), device=self.mesh.device)
        if not self._is_counted:
            return None
        counts = torch.tensor(self._counts(features, samples), dtype=torch.float64)
        own = counts.to(self.mesh.device, non_blocking=True)
        total = sum_over_replicas(self.mesh, own)
        # No replica counts anything: every loss is 0/0 or 0, and stays what it is.
        return torch.where(total > 0, own * size / total, torch.ones_like(own)).float()

    def _counts(self, features: Mapping[str, Any], samples: int) -> list[float]:
        loss = self._settings
        if not self._labels_count:
            return [float(samples)]
        if loss.type == "bert":
            ignored = 0 if loss.ignore_index is None else loss.ignore_index
            return [_count(features[loss.masked_lm_ids], ignored, loss.class_weights), float(samples)]
        return [_count(features[str(loss.label)], loss.ignore_index, loss.class_weights)]


def _count(labels: Any, ignored: int | None, class_weights: tuple[float, ...] | None) -> float:
    """What a mean over labels divides by: how many count, or the sum of their classes' weights."""
    array = labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    counted = array.reshape(-1) if ignored is None else array[array != ignored]
    if class_weights is None:
        return float(counted.size)
    return float(np.asarray(class_weights, dtype=np.float64)[counted].sum())

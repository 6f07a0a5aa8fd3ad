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
from onward.losses.labels import LabelCount
from onward.losses.registry import loss_named
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
        self._is_sum = settings.reduction == "sum"
        self._means = loss_named(settings.type).normalizer(settings)
        differ = batches_may_differ or any(labels is not None and not labels.is_constant for labels in self._means)
        self._is_counted = mesh.data is not None and not self._is_sum and differ
        self.names = loss.parts if self._is_counted and len(self._means) > 1 else loss.computed
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
        if self._is_sum:
            return torch.full((len(self.names),), float(size), device=self.mesh.device)
        if not self._is_counted:
            return None
        counted = [float(samples) if one is None or one.is_constant else _count(features, one) for one in self._means]
        counts = torch.tensor(counted, dtype=torch.float64)
        own = counts.to(self.mesh.device, non_blocking=True)
        total = sum_over_replicas(self.mesh, own)
        # No replica counts anything: every loss is 0/0 or 0, and stays what it is.
        return torch.where(total > 0, own * size / total, torch.ones_like(own)).float()


def _count(features: Mapping[str, Any], counted: LabelCount) -> float:
    """What a mean over labels divides by: how many count, or the sum of their classes' weights."""
    labels = features[counted.feature]
    array = labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    array = array.reshape(-1) if counted.ignored is None else array[array != counted.ignored]
    if counted.class_weights is None:
        return float(array.size)
    return float(np.asarray(counted.class_weights, dtype=np.float64)[array].sum())

"""Local SGD: workers that train by themselves for some updates, and the outer optimizer that makes their weights one.

The mean of the workers' weights every H updates: Stich 2019, "Local SGD Converges Fast and Communicates Little" (arXiv
1805.09767). An outer optimizer on the mean of what the workers changed: Douillard et al. 2023, "DiLoCo" (arXiv
2311.08105), algorithm 1. Moments of the workers' own optimizers stay their own, as there.

`torch.distributed.algorithms.model_averaging` averages the parameters of a full replica that DDP does not know of: it
has no outer optimizer, no shards, and nothing to save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from onward.engine.network.local_weights import LocalWeight
from onward.engine.weight_average import swapped
from onward.parallel.data_parallel import average
from onward.parallel.launch.process import Mesh
from onward.parameters.distributed import Distributed
from onward.plan.communication import BUCKET_BYTES

OUTER_SLOT = "momentum_buffer"


class LocalSGD:
    """The last synchronized weights and running statistics, and the optimizer that moves the weights.

    Args:
        distributed: the section, with `sync_every_updates`.
        mesh: the ranks.
        weights: of this rank, as its own optimizer updates them.
        statistics: running statistics of this rank, changed in place.

    Attributes:
        updates: of the workers since they were synchronized last.
        synchronized: name of a weight or running statistic -> as it was after that.
        momentum: name of a weight -> momentum of the outer optimizer; empty without any.
    """

    def __init__(
        self,
        distributed: Distributed,
        mesh: Mesh,
        weights: Mapping[str, LocalWeight],
        statistics: Mapping[str, torch.Tensor],
    ) -> None:
        assert distributed.sync_every_updates is not None
        self.updates = 0
        self._every, self._mesh = distributed.sync_every_updates, mesh
        self._statistics = {name: tensor for name, tensor in statistics.items() if tensor.is_floating_point()}
        self._own = {name: weight.parameter.detach() for name, weight in weights.items()} | self._statistics
        self._kept = {name: tensor.clone() for name, tensor in self._own.items()}
        self._outer = {name: nn.Parameter(self._kept[name]) for name in weights}
        self._optimizer, self.momentum = _outer_optimizer(distributed, self._outer)
        self._is_swapped = False

    @property
    def synchronized(self) -> Mapping[str, torch.Tensor]:
        """As above; where `in_place` has them is where the workers' own were."""
        return self._own if self._is_swapped else self._kept

    @property
    def own(self) -> Mapping[str, torch.Tensor]:
        """The same names -> as this worker has them."""
        return self._kept if self._is_swapped else self._own

    @property
    def worker(self) -> int:
        """This rank's."""
        return self._mesh.topology.worker(self._mesh.place)

    def after_update(self, is_last: bool) -> bool:
        """Synchronizes where it is due, at the last update of a round in any case; whether it did.

        All workers must call this after the same update; one that skipped it has changed nothing.
        """
        self.updates += 1
        if self.updates < self._every and not is_last:
            return False
        self._synchronize()
        return True

    def end_round(self) -> bool:
        """Synchronizes after an update that nobody knew to be the last of its round; whether anything was left to.

        All workers must call this after the same update.
        """
        if not self.updates:
            return False
        self._synchronize()
        return True

    @torch.no_grad()
    def _synchronize(self) -> None:
        # In buckets, so that no second copy of everything that changed is made.
        bucket, size = list[torch.Tensor](), 0
        for name, outer in self._outer.items():
            outer.grad = (outer - self._own[name]).to(self._mesh.device)
            bucket.append(outer.grad)
            size += outer.grad.nbytes
            if size >= BUCKET_BYTES:
                average(bucket, self._mesh.workers)
                bucket, size = [], 0
        average(bucket, self._mesh.workers)
        average(list(self._statistics.values()), self._mesh.workers)
        for outer in self._outer.values():
            assert outer.grad is not None
            outer.grad = outer.grad.to(outer.device)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for name, tensor in self._statistics.items():
            self._kept[name].copy_(tensor)
        self.adopt()

    @torch.no_grad()
    def adopt(self) -> None:
        """This worker continues with the synchronized weights and statistics."""
        for name, tensor in self._own.items():
            tensor.copy_(self._kept[name])
        self.updates = 0

    @torch.no_grad()
    def begin(self) -> None:
        """What the weights are now, on all workers alike, is what they are synchronized to."""
        for name, tensor in self._own.items():
            self._kept[name].copy_(tensor)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps the synchronized and this worker's own, bit by bit, for as long as this lasts."""
        with swapped(self._own, self._kept):
            self._is_swapped = True
            try:
                yield
            finally:
                self._is_swapped = False

    def record(self) -> dict[str, int]:
        """For checkpoints: how many workers there are, and `updates`."""
        return {"workers": self._mesh.topology.worker_count, "updates": self.updates}

    def is_of_same_workers(self, record: Mapping[str, Any]) -> bool:
        """Whether the record of a checkpoint is of as many workers."""
        return workers_of(record) == self._mesh.topology.worker_count

    def of_worker(self, record: Mapping[str, Any], replica: int) -> dict[str, Any]:
        """What the record of a checkpoint has of a replica's worker alone; empty: it is of other workers."""
        if not self.is_of_same_workers(record):
            return {}
        return dict(next(entry for entry in record["ranks"].values() if entry["data"] == replica))

    def restore(self, record: Mapping[str, Any]) -> list[str]:
        """Takes over the record of a checkpoint once its tensors are loaded; what to report to the user."""
        if self.is_of_same_workers(record):
            self.updates = record["local_sgd"]["updates"]
            return []
        self.adopt()
        return notes_on_workers(record, self._mesh.topology.worker_count)


def workers_of(record: Mapping[str, Any]) -> int:
    """How many workers of local SGD a checkpoint is of; 1: it is of a run without."""
    return int((record.get("local_sgd") or {}).get("workers", 1))


def notes_on_workers(record: Mapping[str, Any], workers: int) -> list[str]:
    """What to report of a run of so many workers that resumes from the checkpoint of another number."""
    before = workers_of(record)
    if before == workers:
        return []
    if before == 1:
        return [
            f"the checkpoint is of a run without distributed.sync_every_updates: its {workers} workers start with the "
            "same weights and moments."
        ]
    lost = record["local_sgd"]["updates"]
    left_out = f", and the {lost} updates that they took by themselves since then are left out" if lost else ""
    return [
        f"the checkpoint is of {before} workers (distributed.sync_every_updates), this run has {workers}: it starts "
        f"from their last synchronized weights, with the moments of the first worker{left_out}."
    ]


def _outer_optimizer(
    distributed: Distributed, weights: Mapping[str, nn.Parameter]
) -> tuple[torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """torch's, with its momentum there from the beginning: zeros, so that every run has the same state to save."""
    is_nesterov, rate = distributed.outer_optimizer == "nesterov", distributed.outer_lr
    optimizer = torch.optim.SGD(
        # torch wants a group; a rank whose stage of a pipeline is frozen has nothing for it.
        [{"params": list(weights.values())}],
        lr=(0.7 if is_nesterov else 1.0) if rate is None else rate,
        momentum=distributed.outer_momentum_used,
        nesterov=is_nesterov,
    )
    slots = {name: torch.zeros_like(one) for name, one in weights.items()} if optimizer.defaults["momentum"] else {}
    for name, tensor in slots.items():
        optimizer.state[weights[name]][OUTER_SLOT] = tensor
    return optimizer, slots

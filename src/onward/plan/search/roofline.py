"""The roofline of a network on one device: what limits each kind of operator, and the utilization that is left.

By the counts and rates that price layouts (`operator_seconds`): an operator takes as long as its matmuls at the
attainable rate or its bytes at the attainable bandwidth, whichever is more (Williams, Waterman and Patterson, 2009,
"Roofline: an insightful visual performance model"); and the host starts one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from onward.plan.search.hardware import Device
from onward.plan.search.layout import Settings
from onward.plan.search.network import NetworkWork
from onward.plan.search.rank_work import operator_seconds

STARTS = 3
"""Kernels of an operator that trains: one forward, two backward."""

Limit = Literal["matmuls", "memory", "launches"]


@dataclass(frozen=True, kw_only=True)
class OperatorKind:
    """All operators of one name, forward and backward, for a micro-batch.

    Attributes:
        name: as they were named.
        count: how many there are.
        operations: floating-point operations.
        moved_bytes: read and written.
        seconds: on the device, one after the other.
        launch_seconds: until the host has started them.
        limit: what takes longest.
    """

    name: str
    count: int
    operations: float
    moved_bytes: float
    seconds: float
    launch_seconds: float
    limit: Limit

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.moved_bytes if self.moved_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A micro-batch and its share of an update on one device.

    Attributes:
        kinds: of operators, the longest first.
        update_seconds: of the optimizer, divided among the micro-batches of an update.
        seconds: of all, where the host starts operators as the device computes.
        launched_seconds: of all, where the host starts them one by one: at least as long as it takes for that.
        rate: attainable operations a second.
        peak_rate: of the data sheet; the attainable rate where there is none.
        balance: operations a byte from which matmuls limit.
    """

    kinds: tuple[OperatorKind, ...]
    update_seconds: float
    seconds: float
    launched_seconds: float
    rate: float
    peak_rate: float
    balance: float

    @property
    def operations(self) -> float:
        """Of the micro-batch, forward and backward."""
        return sum(one.operations for one in self.kinds)

    def utilization(self, seconds: float) -> float:
        """Model FLOPs utilization of a micro-batch that takes so long."""
        return self.operations / seconds / self.peak_rate if seconds else 0.0


def roofline(
    work: NetworkWork, names: Sequence[str], device: Device, settings: Settings, samples: int, micro_batches: int
) -> Roofline:
    """The roofline of a network that one device trains.

    Args:
        work: of the network.
        names: of each of its operators, equal for those of one kind.
        device: that trains it.
        settings: of the run.
        samples: of a micro-batch.
        micro_batches: of an update.
    """
    once = operator_seconds(work, device, settings, samples)
    operations, matmuls = (work.forward + work.backward) * samples, once.matmuls_forward + once.matmuls_backward
    # Logits that a loss computes by chunks are multiplied, but never stored; views move nothing.
    is_stored = work.made > 0
    memory = (once.memory_forward + once.memory_backward) * is_stored
    moved = (work.moved * samples * settings.width / work.width + work.read * settings.width / work.width) * is_stored
    seconds, moved = np.maximum(matmuls, memory), moved * (1 + 2 * work.passes_back)
    is_started = ((work.moved > 0) & is_stored) | (operations > 0)
    starts = is_started * np.where(work.is_differentiated, STARTS, 1)
    kinds = []
    for name in dict.fromkeys(names):
        of_kind = np.array([one == name for one in names]) & (starts > 0)
        if not of_kind.any():
            continue
        total, launch = float(seconds[of_kind].sum()), float(starts[of_kind].sum()) * device.operator_seconds
        by_matmuls = float(matmuls[of_kind].sum()) >= float(memory[of_kind].sum())
        kinds.append(
            OperatorKind(
                name=name,
                count=int(of_kind.sum()),
                operations=float(operations[of_kind].sum()),
                moved_bytes=float(moved[of_kind].sum()),
                seconds=total,
                launch_seconds=launch,
                limit="launches" if launch > total else "matmuls" if by_matmuls else "memory",
            )
        )
    elements = float(work.trained.sum())
    update = elements * (4.0 + 8.0 * (1.0 + settings.slots)) / device.bytes_per_second / micro_batches
    passes, launches = sum(one.seconds for one in kinds), sum(one.launch_seconds for one in kinds)
    rate = device.operations_per_second[settings.precision]
    return Roofline(
        kinds=tuple(sorted(kinds, key=lambda one: -max(one.seconds, one.launch_seconds))),
        update_seconds=update,
        seconds=passes + update,
        launched_seconds=(max(passes, launches) if device.is_asynchronous else passes + launches) + update,
        rate=rate,
        peak_rate=device.peak_operations_per_second.get(settings.precision, rate),
        balance=rate / device.bytes_per_second,
    )

"""All that changes while a run trains; saving it is a checkpoint, loading it goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from onward.data.batches import DataCursor
from onward.lowering.module import OnnxModule
from onward.optim.building import slots_by_name
from onward.optim.loss_scale import LossScale


@dataclass
class Counters:
    """What has been done so far.

    Attributes:
        step: forward/backward passes in this round.
        round: rounds finished.
        update: weight updates over all rounds, skipped ones included.
        skipped_updates: updates left out because a gradient was not finite, over all rounds.
        samples: training samples consumed in this round.
    """

    step: int = 0
    round: int = 0
    update: int = 0
    skipped_updates: int = 0
    samples: int = 0


class TensorShape(Protocol):
    """Something that has a tensor's shape."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of the axes."""


@dataclass(frozen=True)
class _Mark:
    """What changes between two weight updates, as the last update left it."""

    counters: Counters
    cursor: DataCursor
    random: dict[str, torch.Tensor]
    statistics: list[torch.Tensor]


@dataclass
class TrainState:
    """Weights and running statistics (in `net`), moments (in `optimizer`), and everything that counts."""

    net: OnnxModule
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale | None
    counters: Counters = field(default_factory=Counters)
    cursor: DataCursor = field(default_factory=DataCursor)
    _mark: _Mark | None = None

    def mark(self) -> None:
        """Remembers the state as it is now, after a weight update; weights and moments stay until the next one."""
        statistics = self._statistics()
        kept = [torch.empty_like(tensor) for tensor in statistics] if self._mark is None else self._mark.statistics
        _copy_all(statistics, kept)
        self._mark = _Mark(dataclasses.replace(self.counters), self.cursor, self._random_states(), kept)

    def restore_statistics(self) -> None:
        """Puts running statistics back to where they were at the mark."""
        assert self._mark is not None
        _copy_all(self._mark.statistics, self._statistics())

    def return_to_mark(self) -> None:
        """Forgets what was computed since the last weight update: a step that failed, gradients accumulated before."""
        if self._mark is None:
            return
        self.optimizer.zero_grad(set_to_none=True)
        self.restore_statistics()
        self.counters, self.cursor = dataclasses.replace(self._mark.counters), self._mark.cursor
        self._set_random_states(self._mark.random)

    def _statistics(self) -> list[torch.Tensor]:
        own = self.net.tensors_by_name() if self.net.graph.states else {}
        return [own[name] for name in self.net.graph.states]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state by a flat name: `weights/...`, `states/...`, `slots/<slot>/...`, `random/...`."""
        own = self.net.tensors_by_name()
        found = {f"weights/{name}": own[name].detach() for name in self.net.graph.weights}
        found |= {f"states/{name}": own[name] for name in self.net.graph.states}
        for name, slots in slots_by_name(self.optimizer, self.net.weights).items():
            found |= {f"slots/{slot}/{name}": tensor for slot, tensor in slots.items()}
        return found | self._random_states()

    def _random_states(self) -> dict[str, torch.Tensor]:
        found = {"random/cpu": torch.get_rng_state()}
        if self.net.device.type == "cuda":
            found["random/cuda"] = torch.cuda.get_rng_state(self.net.device)
        return found

    def _set_random_states(self, tensors: Mapping[str, torch.Tensor]) -> None:
        torch.set_rng_state(tensors["random/cpu"])
        if "random/cuda" in tensors and self.net.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random/cuda"], self.net.device)

    def record(self) -> dict[str, Any]:
        """Everything of the state that is not a tensor, ready for JSON."""
        return {
            "counters": dataclasses.asdict(self.counters),
            "cursor": self.cursor.to_dict(),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.to_json(),
        }

    def restore(self, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """Takes over `record` and the random states among `tensors`; the other tensors are loaded in place."""
        self.counters = Counters(**record["counters"])
        self.cursor = DataCursor.from_dict(record["cursor"])
        if self.loss_scale is not None and record["loss_scale"] is not None:
            stored = LossScale.from_json(record["loss_scale"])
            # Asked for another kind of loss scale than before, the run begins with that one.
            if stored.reset() == self.loss_scale.reset():
                self.loss_scale = stored
        self._set_random_states(tensors)


def fit_random_states(tensors: dict[str, torch.Tensor], stored: Mapping[str, TensorShape]) -> None:
    """A run may go on elsewhere: the random state of a GPU is read where both a checkpoint and this run have one.

    Args:
        tensors: of the state, changed in place to what the checkpoint holds.
        stored: what the checkpoint holds.
    """
    entry = stored.get("random/cuda")
    if entry is None:
        tensors.pop("random/cuda", None)
    elif "random/cuda" not in tensors:
        tensors["random/cuda"] = torch.empty(tuple(entry.shape), dtype=torch.uint8)


def _copy_all(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    if source:
        torch._foreach_copy_(target, source)

"""What the order of a pipeline's rank is made of: one pass of one micro-batch on one stage each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ActionKind = Literal["forward", "backward", "backward_input", "backward_weight"]


@dataclass(frozen=True)
class Action:
    """One computation of one micro-batch on one stage."""

    kind: ActionKind
    stage: int
    micro_batch: int


class Counter:
    """Numbers the micro-batches of each stage in the order in which one kind of action processes them."""

    def __init__(self, kind: ActionKind) -> None:
        self.kind: ActionKind = kind
        self._next: dict[int, int] = {}

    def on(self, stage: int) -> Action:
        """The next action on a stage."""
        number = self._next.get(stage, 0)
        self._next[stage] = number + 1
        return Action(self.kind, stage, number)

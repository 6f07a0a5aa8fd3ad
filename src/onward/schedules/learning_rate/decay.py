"""What onward knows of a decay of the learning rate: one frozen value that each file of this folder defines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from onward.parameters import LearningRate

DecayShape = Literal["linear", "cosine", "one_minus_sqrt"]


@dataclass(frozen=True, kw_only=True)
class Decay:
    """How the learning rate continues after the warm-up.

    Attributes:
        name: the value of `learning_rate.warmup_mode`, in any case.
        factor: (share of the steps left after the warm-up, the section `learning_rate`) -> share of the highest rate.
        other_name: by which it is known, too.
        has_warmup: whether the rate rises from 0 before.
        reads: its fields that have an effect. With `min_ratio`, the factor is scaled to end there instead of at 0.
    """

    name: str
    factor: Callable[[float, LearningRate], float]
    other_name: str | None = None
    has_warmup: bool = True
    reads: tuple[str, ...] = ()

    def ratio(self, left: float, options: LearningRate) -> float:
        """The share of the highest rate where a share of the steps is left."""
        factor = self.factor(left, options)
        return options.min_ratio + (1 - options.min_ratio) * factor if "min_ratio" in self.reads else factor

"""What onward knows of a decay of the learning rate: one frozen value that each file of this folder defines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Decay:
    """How the learning rate continues after the warm-up.

    Attributes:
        name: the value of `learning_rate.warmup_mode`, in any case.
        factor: (share of the steps that is left after the warm-up, `learning_rate.power`) -> share of the highest rate.
        other_name: by which it is known, too.
        has_warmup: whether the rate rises from 0 before.
        reads_power: whether `learning_rate.power` has an effect.
    """

    name: str
    factor: Callable[[float, float], float]
    other_name: str | None = None
    has_warmup: bool = True
    reads_power: bool = False

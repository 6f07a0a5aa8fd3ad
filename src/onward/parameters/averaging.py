"""The section `averaging` of RUN.yaml: a moving or running average of the weights, evaluated and exported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onward.parameters.field_types import STRICT, Count, CountFromZero, ShareBelowOne


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """An average of the weights over the updates of a run, kept next to them.

    Attributes:
        kind: `ema`: exponential moving average; `swa`: the mean of all averaged weights (stochastic weight averaging);
            absent: nothing is averaged.
        decay: of `ema`: the share of the average that remains at each averaging.
        start_update: weight updates before averaging begins.
        every_updates: average after every so many updates, counted from `start_update`.
        export: `average`: evaluations compare, and the trained model holds, the average; `last`: the weights of the
            last update. Evaluations report both: the metrics of the other one end in `_of_last` or `_of_average`.
    """

    __pydantic_config__ = STRICT
    kind: Literal["ema", "swa"] | None = None
    decay: ShareBelowOne = 0.999
    start_update: CountFromZero = 0
    every_updates: Count = 1
    export: Literal["average", "last"] = "average"


LARGEST_SHARE_OF_FIRST = 0.1
"""Share of an exponential moving average that its first weights may have at the end of a round, without a note."""

_SHARE_ADVISED = 0.01


def notes_on_averaging(averaging: Averaging, count: int, begin: int, end: int) -> list[str]:
    """What to report of a round that is too short for its average.

    Args:
        averaging: as asked.
        count: how often the weights were averaged before the round.
        begin, end: weight updates done before the round, and after it.
    """
    every, start = averaging.every_updates, averaging.start_update
    if averaging.kind is None or end <= begin:
        return []
    times = count + max(0, end - start) // every - max(0, begin - start) // every
    if times < 1:
        return [
            f"averaging: the first average is due at update {start + every:,}, and the round ends with update {end:,}: "
            "evaluations and the trained model are of the last weights. Set averaging.start_update and "
            f"averaging.every_updates so that their sum is {end:,} or less."
        ]
    share = averaging.decay ** (times - 1)
    if averaging.kind == "swa" or times < 2 or share <= LARGEST_SHARE_OF_FIRST:
        return []
    advised = 1 - float(f"{1 - _SHARE_ADVISED ** (1 / (times - 1)):.0e}")
    return [
        f"averaging: an average with averaging.decay {averaging.decay:g} reaches back about "
        f"{every / (1 - averaging.decay):,.0f} updates, and {times * every:,} are averaged by the end of the round: "
        f"{share:.0%} of it is still the first weights that were averaged. Set averaging.decay to {advised:.6g} or "
        "less, or train longer."
    ]

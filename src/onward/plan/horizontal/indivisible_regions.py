"""Regions that could be cut, but into other numbers of parts: their heads, groups or channels, and the sizes that fit.

Such a run is refused, unless the weights concerned are few or the user allows it; then the user is notified.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.errors import ParametersError
from onward.graph.weights.names import WeightNames
from onward.plan.horizontal.regions import Region

MOST_LEFT_WHOLE = 0.05
"""Share of the layers' numbers that may stay unsharded for want of a divisor before a run is refused."""

_LARGEST_LISTED = 1024
_MOST_NAMED = 3
_ATTENTION = ("Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention")


@dataclass(frozen=True, kw_only=True)
class IndivisibleRegion:
    """A region that so many ranks cannot share.

    Attributes:
        region: what would be cut.
        weights: the trained ones in it, by name, the largest first.
        count, unit: what the ranks would have to share: 12 `heads`.
        sizes: numbers of ranks that can, above 1.
    """

    region: Region
    weights: tuple[str, ...]
    count: int
    unit: str
    sizes: tuple[int, ...]

    def reason(self, size: int) -> str:
        """Why these weights are unsharded, as `onward plan` says it."""
        return f"{size} ranks cannot share the {self.count} {self.unit}; {_that_can(self.sizes)}"


def find_indivisible_region(region: Region, weights: Sequence[ir.Value], size: int) -> IndivisibleRegion | None:
    """What of a region `size` does not divide; None if it divides all."""
    counts = region.counts()
    indivisible = {what: count for what, count in counts.items() if count % size}
    if not indivisible:
        return None
    what, count = min(indivisible.items(), key=lambda item: item[1])
    by_size = sorted(weights, key=lambda weight: -(0 if weight.const_value is None else weight.const_value.size))
    names = tuple(str(weight.name) for weight in by_size)
    return IndivisibleRegion(
        region=region, weights=names, count=count, unit=_unit(region, what), sizes=_divisors(math.gcd(*counts.values()))
    )


def check_divisibility(
    size: int,
    indivisible: Sequence[IndivisibleRegion],
    common: int,
    numbers: Mapping[str, int],
    cut: Collection[str],
    allowed: bool,
    known_as: WeightNames,
) -> tuple[str, ...]:
    """What to report to the user of weights that stay unsharded only because `size` does not divide them; a sentence
    or none.

    Args:
        size: tensor-parallel ranks.
        indivisible: what a size that divides everything would cut, and this one does not.
        common: greatest common divisor of whatever the ranks would then share.
        numbers: trained weight of any layer that could be cut, also by other sizes -> how many numbers it has.
        cut: those that are cut.
        allowed: whether the user takes whatever is left unsharded.
        known_as: what weights are called in messages.

    Raises:
        ParametersError: they hold more than `MOST_LEFT_WHOLE` of these numbers, and that is not allowed.
    """
    lost = [found for found in indivisible if any(name not in cut for name in found.weights)]
    if not lost:
        return ()
    left = sum(numbers[name] for name in {n for found in lost for n in found.weights} if name not in cut)
    share = left / sum(numbers.values())
    text = _sentences(size, lost, cut, known_as)
    fitting = _divisors(common)
    if share <= MOST_LEFT_WHOLE or (allowed and cut):
        return (f"every tensor-parallel rank holds {share:.1%} of the layers unsharded: {text}.",)
    listed = ", ".join(map(str, fitting))
    remedy = f"Sizes that divide every layer: {listed}." if listed else "No size divides every layer."
    way_out = (
        " distributed.allow_whole_layers: true trains anyway, with these layers unsharded on every rank." if cut else ""
    )
    raise ParametersError(
        f"distributed.horizontal_parallel_size is {size}, but {text}. {remedy}{way_out} Data and pipeline parallelism "
        "need no divisor."
    )


def _sentences(size: int, indivisible: Sequence[IndivisibleRegion], cut: Collection[str], known_as: WeightNames) -> str:
    groups: dict[tuple[int, str, tuple[int, ...]], list[str]] = {}
    for found in indivisible:
        names = groups.setdefault((found.count, found.unit, found.sizes), [])
        names.extend(name for name in found.weights if name not in cut and name not in names)
    parts = []
    for (count, unit, sizes), names in list(groups.items())[:_MOST_NAMED]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        parts.append(
            f"{size} does not divide the {count} {unit} of {known_as.shown(names[0])!r}{more} ({_that_can(sizes)})"
        )
    if len(groups) > _MOST_NAMED:
        parts.append(f"nor what {len(groups) - _MOST_NAMED} more kinds of layers have")
    return "; ".join(parts)


def _that_can(sizes: Sequence[int]) -> str:
    return f"sizes that can: {', '.join(map(str, sizes)) or 'none'}"


def _divisors(count: int) -> tuple[int, ...]:
    return tuple(n for n in range(2, min(count, _LARGEST_LISTED) + 1) if count % n == 0)


def _unit(region: Region, what: str) -> str:
    """What a user calls the things that a node or an axis counts."""
    if what.startswith(("heads", "groups of channels", "groups")):
        return what.split(" of node")[0]
    operators = {node.op_type for node in region.assignments}
    convolves = bool(operators & {"Conv", "ConvTranspose"})
    if what.startswith("parts of axis"):
        return "heads" if operators.intersection(_ATTENTION) else "groups of channels" if convolves else "groups"
    return "channels" if convolves else "features"

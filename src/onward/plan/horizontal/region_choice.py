"""Which of the regions that could be cut are: no two that clash, and together as much as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onward.graph.training_graph import TrainingGraph
from onward.plan.horizontal.regions import Region

_MOST_SEARCHED = 16


def choose_regions(regions: Sequence[Region], graph: TrainingGraph) -> list[Region]:
    """Regions of which no two clash, with as many cut weight elements as possible: exactly for few, else greedily."""
    worth = {id(r): sum(size_of(w) for w in r.weights({*graph.weights, *graph.adapters})) for r in regions}
    clashes = {id(r): {id(o) for o in regions if o is not r and clash(r, o)} for r in regions}
    chosen: list[Region] = []
    left = list(regions)
    while left:
        group, waiting = [], [left[0]]
        while waiting:
            region = waiting.pop()
            if region in group:
                continue
            group.append(region)
            waiting.extend(o for o in left if id(o) in clashes[id(region)])
        left = [r for r in left if r not in group]
        chosen.extend(_best_of(group, worth, clashes))
    return [r for r in regions if r in chosen]


def size_of(weight: ir.Value) -> int:
    """The elements of a weight."""
    stored = weight.const_value
    return 0 if stored is None else int(stored.size)


def _best_of(group: list[Region], worth: Mapping[int, int], clashes: Mapping[int, set[int]]) -> list[Region]:
    ordered = sorted(group, key=lambda r: -worth[id(r)])
    if len(group) > _MOST_SEARCHED:
        taken: list[Region] = []
        for region in ordered:
            if not any(id(other) in clashes[id(region)] for other in taken):
                taken.append(region)
        return taken
    best: tuple[int, list[Region]] = (0, [])

    def search(place: int, total: int, taken: list[Region], rest: int) -> None:
        nonlocal best
        if total > best[0]:
            best = (total, list(taken))
        if place == len(ordered) or total + rest <= best[0]:
            return
        region = ordered[place]
        own = worth[id(region)]
        if not any(id(other) in clashes[id(region)] for other in taken):
            search(place + 1, total + own, [*taken, region], rest - own)
        search(place + 1, total, taken, rest - own)

    search(0, 0, [], sum(worth[id(r)] for r in ordered))
    return best[1]


def clash(left: Region, right: Region) -> bool:
    """Whether two regions cut the same value or weight, or write the same node."""
    if any(value in right.cuts for value in left.cuts):
        return True
    return any(node in right.assignments for node in left.assignments)

"""What must hold of the order in which a rank computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from onward.schedules.pipeline.actions import Action


def assert_complete(actions: Sequence[Action], stages: Collection[int], count: int, kinds: Collection[str]) -> None:
    """Every stage computes each micro-batch once in every way, in the order of `kinds`."""
    expected = {(kind, stage, m) for kind in kinds for stage in stages for m in range(count)}
    places: dict[tuple[str, int, int], int] = {
        (one.kind, one.stage, one.micro_batch): place for place, one in enumerate(actions)
    }
    assert len(actions) == len(places) == len(expected)
    assert set(places) == expected
    for stage in stages:
        for m in range(count):
            order = [places[kind, stage, m] for kind in kinds]
            assert order == sorted(order)


def most_held(actions: Sequence[Action]) -> int:
    """The most micro-batches that a stage has forwarded and not yet gone back through."""
    held: Counter[int] = Counter()
    most = 0
    for one in actions:
        if one.kind == "forward":
            held[one.stage] += 1
        elif one.kind in ("backward", "backward_input"):
            held[one.stage] -= 1
        most = max(most, *held.values())
    return most

"""Fifty random kills over all layouts, in start-up, training, saving and export: nothing is lost or left behind.

Killed are the launcher, a rank or all processes; `python -m benchmarks.killed_ranks` kills as many as one likes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.invariants.killing import LAYOUTS, MOMENTS, Arena

KILLS = {
    "one process": 6,
    "replicas": 6,
    "ZeRO 1": 6,
    "ZeRO 2": 6,
    "ZeRO 3": 6,
    "tensor parallel": 6,
    "pipeline": 6,
    "replicas of a pipeline": 4,
    "adapters": 4,
}


def test_fifty_kills_are_shared_out_over_all_layouts() -> None:
    assert sum(KILLS.values()) == 50
    assert KILLS.keys() == LAYOUTS.keys()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_runs_end_with_the_bits_of_one_that_never_was(layout: str, tmp_path: Path) -> None:
    tally = Arena(tmp_path / "arena", layout, seed=1).kill(KILLS[layout])
    assert tally.count() == KILLS[layout]
    assert {moment for _, moment in tally.kills} == set(MOMENTS)
    assert (tally.orphans, tally.leftovers, tally.differing) == (0, 0, 0)
    assert tally.runs > 0


def lose_random_states(rank: int) -> None:
    from onward.engine.state import TrainState

    TrainState.set_random_states = lambda *arguments: None  # type: ignore[method-assign]


def test_a_state_that_does_not_survive_is_seen(tmp_path: Path) -> None:
    tally = Arena(tmp_path / "arena", "one process", 1, lose_random_states).kill(2)
    assert tally.differing > 0
    assert not tally.is_held

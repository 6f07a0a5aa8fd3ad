"""Fifty random kills over all layouts, of a rank or of all, in start-up, training, saving and export: nothing is lost.

`python -m benchmarks.killed_ranks` kills a thousand, and launchers, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.invariants.killing import LAYOUTS, MOMENTS, Arena

KILLS = {
    "one process": 8,
    "replicas": 8,
    "ZeRO 1": 6,
    "ZeRO 2": 6,
    "ZeRO 3": 6,
    "tensor parallel": 6,
    "pipeline": 6,
    "replicas of a pipeline": 4,
}


def test_fifty_kills_are_shared_out_over_all_layouts() -> None:
    assert sum(KILLS.values()) == 50
    assert KILLS.keys() == LAYOUTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_runs_end_with_the_bits_of_one_that_never_was(layout: str, tmp_path: Path) -> None:
    tally = Arena(tmp_path / "arena", layout, seed=1).kill(KILLS[layout])
    assert sum(tally.kills.values()) == KILLS[layout]
    assert {kind.split(", ")[1] for kind in tally.kills} == set(MOMENTS)
    assert tally.orphans == 0
    assert tally.runs > 0
    assert tally.differing == 0

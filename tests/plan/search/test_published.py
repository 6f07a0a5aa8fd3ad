"""The price model against published runs: step times within 15 %, and their layouts found again or beaten."""

from __future__ import annotations

import pytest
from benchmarks.layout_published import Published, published

from onward.plan.search.choosing import choose_layout
from onward.plan.search.hardware import KNOWN
from onward.plan.search.pricing import Pricing

RUNS = published()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.name} on {run.layout.ranks}, {run.layout.kept:g} kept")
def test_step_times(run: Published) -> None:
    work = run.network.work(run.is_sequence_parallel)
    estimate = Pricing(work, KNOWN[run.gpu], run.settings()).estimate(run.layout)
    assert estimate.total_seconds == pytest.approx(run.seconds, rel=0.15)


@pytest.mark.parametrize(
    "run", [RUNS[6], RUNS[9], RUNS[11], RUNS[15]], ids=lambda run: f"{run.name} on {run.layout.ranks}"
)
def test_layouts_are_found_again_or_beaten(run: Published) -> None:
    work, cluster = run.network.work(run.is_sequence_parallel), KNOWN[run.gpu]
    theirs = Pricing(work, cluster, run.settings()).estimate(run.layout)
    assert theirs.fits
    assert choose_layout([work], cluster, run.settings()).chosen.total_seconds <= theirs.total_seconds * 1.01

"""The report of a search says what a reader needs to change."""

from __future__ import annotations

import pytest
from benchmarks.layout_published import Transformer

from onward.plan.report.layouts import render_choice
from onward.plan.search.choosing import choose_layout
from onward.plan.search.hardware import KNOWN
from onward.plan.search.layout import Settings

SMALL = Transformer(layers=8, width=1024, heads=8, vocabulary=8192, tokens=512).work()
FEWER = "An update has 8 samples, fewer than the 16 ranks"


@pytest.mark.parametrize("samples", [8, 16])
def test_fewer_samples_than_ranks_are_told(samples: int) -> None:
    settings = Settings(ranks=16, samples=samples, memory_bytes=85e9)
    choice = choose_layout([SMALL], KNOWN["h100"], settings)
    text = " ".join(render_choice(choice, SMALL, KNOWN["h100"], settings, explain=False).split())
    assert (FEWER in text) == (samples == 8)
    none = "there is none: 16 ranks cannot divide the 8 samples of an update, or the network, like that"
    assert (f"replicas only: {none}" in text) == (samples == 8)

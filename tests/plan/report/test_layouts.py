"""The report of a search says what a reader needs to change."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize(("ranks", "of_node"), [(16, 7), (16, 8), (4, 8)])
def test_a_last_node_that_is_not_full_is_noted(ranks: int, of_node: int) -> None:
    cluster, settings = (
        replace(KNOWN["h100"], ranks_of_node=of_node),
        Settings(ranks=ranks, samples=64, memory_bytes=85e9),
    )
    choice = choose_layout([SMALL], cluster, settings)
    text = " ".join(render_choice(choice, SMALL, cluster, settings, explain=False).split())
    note = (
        "Nodes 16 ranks do not fill nodes of 7: 2 are full, the last has 2. The forecast counts groups of ranks as if "
        "every node were full. Pass --nodes-of 4 or 8, which divide 16, or 14 or 21 ranks."
    )
    assert (note in text) == ("Nodes" in text) == (of_node == 7)
    if of_node == 8 and ranks == 16:
        row = text[text.index("- ZeRO 3 over all ranks: ") : text.index("- tensor parallelism in a node")]
        assert "ZeRO 3, " in row
        assert "in groups of" not in row, "shards of a node are not shards over all ranks"

"""What an update of other samples, which all ranks can share, would gain."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from benchmarks.layout_published import Transformer

from onward.errors import ParametersError
from onward.plan.search.choosing import LayoutSearch, choose_layout, even_updates
from onward.plan.search.hardware import KNOWN
from onward.plan.search.layout import Layout, Settings

SMALL = Transformer(layers=8, width=1024, heads=8, vocabulary=8192, tokens=512).work()
H100 = KNOWN["h100"]


def test_samples_that_ranks_cannot_share_evenly() -> None:
    """Six ranks and 512 samples: two replicas of three ranks; 510 or 516 samples let six replicas train."""
    settings = Settings(ranks=6, samples=512, memory_bytes=85e9)
    chosen = choose_layout([SMALL], H100, settings).chosen
    assert chosen.layout.data == 2
    found = even_updates([SMALL], H100, settings, chosen)
    assert list(found) == [510, 516]
    for samples, one in found.items():
        assert one.layout.data == 6
        assert samples / one.total_seconds > 1.01 * 512 / chosen.total_seconds


def test_nothing_is_gained_where_all_ranks_share_the_samples() -> None:
    seven = Settings(ranks=7, samples=12, memory_bytes=85e9)
    assert even_updates([SMALL], H100, seven, choose_layout([SMALL], H100, seven).chosen) == {}, "7 and 14 are others"
    for samples in (512, 6 * 64):
        settings = Settings(ranks=8 if samples == 512 else 6, samples=samples, memory_bytes=85e9)
        chosen = choose_layout([SMALL], H100, settings).chosen
        assert even_updates([SMALL], H100, settings, chosen) == {}


def test_the_numbers_are_named_where_no_layout_can_be() -> None:
    one = dataclasses.replace(SMALL, tensor_sizes=(1,), sent=np.zeros(1), is_narrow=np.zeros(1, dtype=bool))
    one = dataclasses.replace(one, block=np.zeros_like(one.block))
    with pytest.raises(ParametersError, match=r"a multiple of 6, such as 510 or 516; now 2 replicas could share them"):
        choose_layout([one], H100, Settings(ranks=6, samples=512, memory_bytes=85e9))


def test_a_layout_that_needs_more_than_was_counted_is_not_chosen_again() -> None:
    """What was counted is not counted again; the others are chosen as by a search of its own."""
    settings = Settings(ranks=8, samples=64, memory_bytes=85e9)
    search = LayoutSearch([SMALL], H100, settings)
    first = search.choose()
    assert first == choose_layout([SMALL], H100, settings)

    def more_memory(one: Layout) -> float:
        return 1e9 if one.form == first.chosen.layout.form else 1.0

    second = search.choose(more_memory)
    assert second.chosen.layout.form != first.chosen.layout.form
    assert second == LayoutSearch([SMALL], H100, settings).choose(more_memory)
    assert search.choose() == first

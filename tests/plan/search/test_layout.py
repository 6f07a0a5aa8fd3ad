"""`Layout` and the dimensions of the search: groups of ZeRO, replicas that share experts."""

from __future__ import annotations

import dataclasses

import numpy as np
from benchmarks.layout_published import Transformer

from onward.parameters.distributed import Distributed, distribution_problems
from onward.plan.search.hardware import KNOWN
from onward.plan.search.layout import Layout, Settings, layouts

SMALL = Transformer(layers=4, width=256, heads=8, vocabulary=512, tokens=64).work()


def test_fields_and_words() -> None:
    one = Layout(data=32, zero_stage=3, zero_group=8, batch_size=2)
    assert str(one) == "32 data x 1 tensor x 1 pipeline, ZeRO 3 in groups of 8, 1 micro-batch of 2"
    assert one.sharers == 8
    assert Layout(data=32, zero_stage=1).sharers == 32
    assert Layout(data=32).sharers == 1
    experts = Layout(data=8, experts=4, zero_stage=1)
    assert str(experts) == "8 data x 1 tensor x 1 pipeline, experts over 4, ZeRO 1, 1 micro-batch of 1"
    for layout in (one, experts):
        asked = Distributed(**layout.sections()["distributed"])
        assert distribution_problems(asked, 1) == []
        assert (asked.zero_group_size or 0, asked.expert_parallel_size) == (layout.zero_group, layout.experts)
        assert asked.world_size == layout.ranks
    assert len({layout.form for layout in (one, experts, dataclasses.replace(one, zero_group=0))}) == 3


def test_groups_are_nodes_of_the_replicas() -> None:
    settings = Settings(ranks=128, samples=128, memory_bytes=85e9)
    found = {(one.horizontal, one.data, one.zero_group) for one in layouts(SMALL, KNOWN["h100"], settings)}
    assert {group for size, data, group in found if (size, data) == (1, 128)} == {0, 8, 64}
    assert {group for size, data, group in found if (size, data) == (4, 32)} == {0, 2, 16}
    assert {group for size, data, group in found if (size, data) == (8, 16)} == {0, 8}
    assert all(one.zero_stage for one in layouts(SMALL, KNOWN["h100"], settings) if one.zero_group)


def test_experts_over_some_replicas_allow_what_a_run_allows() -> None:
    """An expert that is on some of the replicas has its gradients there: ZeRO 2 and 3 shard them over all."""
    counts = np.zeros(len(SMALL.block))
    work = dataclasses.replace(SMALL, expert_sizes=(2, 4, 8), of_experts=counts, exchanged=counts)
    found = list(layouts(work, KNOWN["h100"], Settings(ranks=8, samples=8, memory_bytes=85e9)))
    assert {one.experts for one in found if one.data == 8} == {1, 2, 4, 8}
    assert {one.zero_stage for one in found if one.data == 8 and one.experts == 4} == {0, 1}
    assert {one.zero_stage for one in found if one.data == 8 and one.experts == 8} == {0, 1, 2, 3}
    assert all(one.replicas % one.experts == 0 for one in found)

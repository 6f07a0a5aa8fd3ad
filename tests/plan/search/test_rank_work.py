"""Sums over the operators of a network for each rank of a pipeline."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from benchmarks.layout_published import Transformer

from onward.plan.search.hardware import KNOWN, Link
from onward.plan.search.layout import Layout, Settings
from onward.plan.search.rank_work import ACTION_OPERATORS, RankWork

SMALL = Transformer(layers=8, width=256, heads=8, vocabulary=512, tokens=64).work()
SETTINGS = Settings(ranks=4, samples=64, memory_bytes=85e9)
CPU = dataclasses.replace(
    KNOWN["h100"], device=dataclasses.replace(KNOWN["h100"].device, is_asynchronous=False, operator_seconds=1e-5)
)


def test_ranks_share_the_work_and_the_weights_of_a_network() -> None:
    work = RankWork(SMALL, KNOWN["h100"], SETTINGS)
    alone, ranks = work.of(Layout(batch_size=2)), work.of(Layout(pipeline=4, batch_size=2, micro_batches=4))
    assert len(ranks.elements) == 4
    for kind in ("elements", "kept", "frozen", "full_elements"):
        assert getattr(ranks, kind).sum() == pytest.approx(getattr(alone, kind).sum())
    halves = work.of(Layout(horizontal=2, batch_size=2))
    split = SMALL.trained_split.sum()
    assert halves.elements.sum() == pytest.approx(SMALL.trained.sum() - split / 2)


@pytest.mark.parametrize("stages", [1, 2])
def test_passes_through_stages_take_time_on_the_host(stages: int) -> None:
    schedule = "Interleaved1F1B" if stages > 1 else "1F1B"
    layout = Layout(pipeline=2, schedule=schedule, stages_per_rank=stages, batch_size=2, micro_batches=4)
    work = RankWork(SMALL, CPU, SETTINGS)
    alone, ranks = work.of(Layout(batch_size=2)), work.of(layout)
    each = stages * ACTION_OPERATORS * 1e-5
    assert ranks.forward.sum() - alone.forward.sum() == pytest.approx(2 * each)
    assert ranks.backward.sum() - alone.backward.sum() == pytest.approx(2 * 2 * each)


def test_experts_are_counted_apart_and_split_by_tensor_parallel_ranks() -> None:
    experts = np.where(np.arange(len(SMALL.trained)) == int(SMALL.trained_split.argmax()), SMALL.trained, 0.0)
    work = RankWork(dataclasses.replace(SMALL, of_experts=experts), KNOWN["h100"], SETTINGS)
    one, two = work.of(Layout(data=2, experts=2)), work.of(Layout(data=2, experts=2, horizontal=2))
    assert one.experts.sum() == experts.sum()
    assert two.experts.sum() == experts.sum() / 2
    assert one.elements.sum() + one.experts.sum() == pytest.approx(SMALL.trained.sum())


def test_experts_that_no_replicas_share_are_weights_like_others() -> None:
    """Of which ZeRO holds shards, and whose gradients it reduces for every micro-batch."""
    work = RankWork(dataclasses.replace(SMALL, of_experts=SMALL.trained), KNOWN["h100"], SETTINGS)
    assert work.of(Layout(data=2)).experts.sum() == 0
    assert work.of(Layout(data=2)).elements.sum() == pytest.approx(SMALL.trained.sum())


def test_stages_begin_where_the_plan_begins_them() -> None:
    """The plan knows no links: slow ones would move the cuts of the search to where least is sent."""
    h100, layout = KNOWN["h100"], Layout(pipeline=4, batch_size=2, micro_batches=8)
    slow = dataclasses.replace(h100, inside=Link(1.0, 0.0), between=Link(1.0, 0.0))
    given = dataclasses.replace(SMALL, sent=SMALL.sent * (1.0 + np.arange(len(SMALL.sent)) % 3))
    one, two = (RankWork(given, cluster, SETTINGS).of(layout) for cluster in (h100, slow))
    assert np.array_equal(one.elements, two.elements)
    assert one.sent_bytes == two.sent_bytes

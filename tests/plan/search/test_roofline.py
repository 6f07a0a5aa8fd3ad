"""The roofline against its formulas, and against the prices of layouts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from benchmarks.layout_published import Transformer

from onward.plan.search.hardware import KNOWN
from onward.plan.search.layout import Layout, Settings
from onward.plan.search.rank_work import RankWork
from onward.plan.search.roofline import roofline

WORK = Transformer(layers=8, width=256, heads=8, vocabulary=512, tokens=64).work()
SETTINGS = Settings(ranks=1, samples=64, memory_bytes=85e9, precision="bf16")
NAMES = [f"operator {k}" for k in range(len(WORK.block))]
H100 = KNOWN["h100"].device
IDLE_HOST = dataclasses.replace(H100, operator_seconds=0.0)


def test_every_operator_takes_the_longer_of_matmuls_and_memory() -> None:
    """By the formulas of the roofline, with 2 bytes an element, as bf16 has."""
    found = roofline(WORK, NAMES, IDLE_HOST, SETTINGS, samples=8, micro_batches=1)
    by_name = {one.name: one for one in found.kinds}
    for place, name in enumerate(NAMES):
        if name not in by_name:
            assert WORK.forward[place] + WORK.backward[place] == 0
            continue
        one = by_name[name]
        moved = (WORK.moved[place] * 8 + WORK.read[place]) * 2 / WORK.width
        backward = 2 * moved if WORK.kept[place] + WORK.backward[place] > 0 else 0.0
        assert one.moved_bytes == pytest.approx((moved + backward) * (WORK.made[place] > 0))
        assert one.operations == pytest.approx((WORK.forward[place] + WORK.backward[place]) * 8)
        matmuls, memory = one.operations / 613.18e12, one.moved_bytes / 2.68e12
        assert one.seconds == pytest.approx(max(matmuls, memory))
        assert one.limit == ("matmuls" if matmuls >= memory else "memory")
        assert one.intensity == pytest.approx(one.operations / one.moved_bytes if one.moved_bytes else 0.0)
    assert found.balance == pytest.approx(613.18e12 / 2.68e12)
    assert found.operations == pytest.approx(WORK.operations(8))
    assert found.utilization(found.seconds) == pytest.approx(WORK.operations(8) / found.seconds / 989e12)


def test_it_is_what_layouts_are_priced_with() -> None:
    """Where all results are stored, the passes take what the search of a layout counts for one rank."""
    stored = dataclasses.replace(WORK, made=np.ones(len(WORK.made)), moved=np.maximum(WORK.moved, 1e-9))
    found = roofline(stored, NAMES, IDLE_HOST, SETTINGS, samples=8, micro_batches=1)
    cluster = dataclasses.replace(KNOWN["h100"], device=IDLE_HOST)
    priced = RankWork(stored, cluster, SETTINGS).of(Layout(batch_size=8))
    assert found.seconds - found.update_seconds == pytest.approx(float((priced.forward + priced.backward).sum()))


def test_kinds_are_summed_and_the_longest_is_first() -> None:
    one_by_one = roofline(WORK, NAMES, H100, SETTINGS, samples=8, micro_batches=1)
    names = [f"kind {k % 3}" for k in range(len(NAMES))]
    found = roofline(WORK, names, H100, SETTINGS, samples=8, micro_batches=1)
    assert {one.name for one in found.kinds} == {"kind 0", "kind 1", "kind 2"}
    assert sum(one.count for one in found.kinds) == len(one_by_one.kinds)
    assert found.seconds == pytest.approx(one_by_one.seconds)
    longest = [max(one.seconds, one.launch_seconds) for one in found.kinds]
    assert longest == sorted(longest, reverse=True)


def test_a_slow_host_limits_a_gpu_and_delays_a_cpu() -> None:
    slow = dataclasses.replace(H100, operator_seconds=1.0)
    found = roofline(WORK, NAMES, slow, SETTINGS, samples=8, micro_batches=1)
    assert {one.limit for one in found.kinds} == {"launches"}
    launches = sum(one.launch_seconds for one in found.kinds)
    assert found.launched_seconds == pytest.approx(launches + found.update_seconds)
    cpu = roofline(WORK, NAMES, dataclasses.replace(slow, is_asynchronous=False), SETTINGS, 8, 1)
    assert cpu.launched_seconds == pytest.approx(launches + cpu.seconds)


def test_micro_batches_share_the_update_and_a_measured_device_has_no_peak() -> None:
    """AdamW reads weight, gradient and two moments, and writes three of them, 4 bytes each."""
    measured = dataclasses.replace(H100, peak_operations_per_second={})
    found = roofline(WORK, NAMES, measured, SETTINGS, samples=8, micro_batches=4)
    assert found.update_seconds == pytest.approx(28 * WORK.trained.sum() / 2.68e12 / 4)
    assert found.peak_rate == found.rate

"""The roofline as text."""

from __future__ import annotations

import dataclasses
import re

from benchmarks.layout_published import Transformer

from onward.plan.report.roofline import render_roofline
from onward.plan.search.hardware import KNOWN
from onward.plan.search.layout import Settings
from onward.plan.search.roofline import roofline

WORK = Transformer(layers=8, width=256, heads=8, vocabulary=512, tokens=64).work()
SETTINGS = Settings(ranks=1, samples=64, memory_bytes=85e9, precision="bf16")
H100 = KNOWN["h100"].device


def test_what_is_not_shown_is_summed_up_and_shares_are_of_the_total() -> None:
    names = [f"operator {k}" for k in range(len(WORK.block))]
    found = roofline(WORK, names, H100, SETTINGS, samples=8, micro_batches=1)
    text = render_roofline(found, H100, 8, "bf16", ["a note."])
    assert f"{len(found.kinds) - 16} other kinds" in text
    assert "Notes\n  - a note.\n" in text
    shares = [
        float(word[:-1])
        for line in text.splitlines()
        if not re.search("MFU|of the time;", line)
        for word in line.split()
        if "%" in word
    ]
    assert abs(sum(shares) - 100) < 1.0
    assert "measured matmul rate" not in text


def test_a_measured_device_is_compared_with_its_own_matmuls() -> None:
    device = dataclasses.replace(H100, peak_operations_per_second={})
    found = roofline(WORK, ["all"] * len(WORK.block), device, SETTINGS, samples=8, micro_batches=1)
    text = render_roofline(found, device, 8, "bf16", [])
    assert text.count("MFU (of the measured matmul rate)") == 2
    assert "Notes" not in text


def test_where_bytes_limit_the_advice_is_compiled_code() -> None:
    """Which a GPU runs anyway."""
    slow = dataclasses.replace(H100, bytes_per_second=1e5)
    for is_gpu, advice in (
        (True, "compiled code, the default on GPUs, fuses neighbors."),
        (False, "set speed.compile, which fuses neighbors."),
    ):
        device = dataclasses.replace(slow, is_asynchronous=is_gpu)
        found = roofline(WORK, ["all"] * len(WORK.block), device, SETTINGS, samples=8, micro_batches=10**12)
        assert re.search(rf"moving bytes: \d+% of the time; {advice}", render_roofline(found, device, 8, "bf16", []))


def test_a_cpu_is_told_nothing_of_kernels() -> None:
    device = dataclasses.replace(H100, is_asynchronous=False)
    found = roofline(WORK, ["all"] * len(WORK.block), device, SETTINGS, samples=8, micro_batches=1)
    text = render_roofline(found, device, 8, "bf16", [])
    assert "kernel" not in text
    assert "CUDA" not in text

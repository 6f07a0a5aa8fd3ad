"""The rate of matmuls, and operations in a unit of their size."""

from __future__ import annotations

import itertools

import pytest
import torch

from onward.engine import matmul_rate as matmul_rate_module
from onward.engine.matmul_rate import format_operations, matmul_rate


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (512.0, "0.5 kFLOP"),
        (28_860.0, "28.9 kFLOP"),
        (7.1e7, "71.0 MFLOP"),
        (3.29e10, "32.9 GFLOP"),
        (8e14, "800.0 TFLOP"),
    ],
)
def test_operations_are_counted_in_a_unit_of_their_size(count: float, words: str) -> None:
    assert format_operations(count) == words


def test_the_rate_of_a_product_is_that_of_real_work() -> None:
    assert 1e8 < matmul_rate(torch.device("cpu"), torch.float32) < 1e15


def test_a_busy_cpu_counts_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matmul that takes a second by the clock, in which two threads computed for a tenth of one each."""
    seconds = itertools.count()
    monkeypatch.setattr(matmul_rate_module.time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(matmul_rate_module.time, "process_time", lambda: 0.1 * float(next(seconds)))
    monkeypatch.setattr(matmul_rate_module, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert matmul_rate(torch.device("cpu"), torch.float32, 10.0) == pytest.approx(2 * 1024**3 / (0.1 * 2 / 2))


def test_an_idle_cpu_counts_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads of the process may have computed meanwhile."""
    seconds = itertools.count()
    monkeypatch.setattr(matmul_rate_module.time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(matmul_rate_module.time, "process_time", lambda: 100.0 * float(next(seconds)))
    assert matmul_rate(torch.device("cpu"), torch.float32, 20.0) == pytest.approx(2 * 1024**3 / 2.0)

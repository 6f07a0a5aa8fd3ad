"""Allocations of tensors that are alive."""

from __future__ import annotations

import torch

from onward.engine.forecast.allocations import Allocations


def test_allocations_are_those_of_tensors_alive() -> None:
    with Allocations() as log:
        first = torch.zeros(100)
        second = first + 1
        view = second[:10]
        start = log.now
        third = second * 2
        del third
        end = log.now
        log.name([first], "weights")
        del second
        still = log.now
        del view
        gone = log.now
    assert log.alive(start) == {"weights": 400.0, "working memory": 400.0}
    assert sum(log.peak(start, end).values()) == 1200.0
    assert sum(log.alive(still).values()) == 800.0, "a view keeps its storage"
    assert log.alive(gone) == {"weights": 400.0, "working memory": 0.0}

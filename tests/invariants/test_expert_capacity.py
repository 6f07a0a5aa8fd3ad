"""Tokens dropped by capacity: ranks that share experts drop what one process does that takes their batches in turns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, assert_follows, train

FACTOR = {"expert_capacity_factor": 0.75}


def run(layout: Layout, batch: int, accumulation: int) -> Any:
    return train(CASES["mixtures"], layout, global_batch=batch, accumulation=accumulation, updates=4)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_ranks_drop_the_tokens_that_one_process_drops(zero_stage: int) -> None:
    """Capacity is that of a process's micro-batch: two replicas of 4 samples are two micro-batches of 4."""
    expected = run(Layout(1, 1, 1, FACTOR), 4, 2)
    shared = {**FACTOR, "expert_parallel_size": 2, "zero_stage": zero_stage}
    assert_follows(run(Layout(2, 1, 1, shared), 8, 1), expected, 1e-5, 1e-4)
    dropless = run(Layout(), 4, 2)
    assert np.abs(np.subtract(dropless.losses, expected.losses)).max() > 1e-3, "something is dropped"

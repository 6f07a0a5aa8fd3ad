"""ZB-V: a rank holds one stage on the way down and one on the way up; fewer micro-batches than it needs are fine."""

from __future__ import annotations

import pytest

from onward.schedules.pipeline.zero_bubble_v import ZERO_BUBBLE_V
from tests.schedules.pipeline.orders import assert_complete, most_held


@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 1), (2, 3), (3, 8), (4, 2)])
def test_every_rank(size: int, count: int) -> None:
    for rank in range(size):
        actions = ZERO_BUBBLE_V.order(rank, size, count, 2 * size)
        kinds = ("forward", "backward_input", "backward_weight")
        assert_complete(actions, {rank, 2 * size - 1 - rank}, count, kinds)
        assert most_held(actions) <= min(2 * size, count)

"""Interleaved 1F1B: each rank goes through its stages in rounds; with split backwards, weights come later."""

from __future__ import annotations

import pytest

from onward.schedules.pipeline.interleaved import INTERLEAVED_1F1B, interleaved
from tests.schedules.pipeline.orders import assert_complete


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("size", "count", "local"), [(2, 2, 2), (2, 4, 3), (4, 8, 2), (3, 3, 1)])
def test_every_rank(size: int, count: int, local: int, split: bool) -> None:
    kinds = ("forward", "backward_input", "backward_weight") if split else ("forward", "backward")
    for rank in range(size):
        actions = interleaved(rank, size, count, size * local, split)
        assert_complete(actions, {rank + size * one for one in range(local)}, count, kinds)


def test_rounds_go_down_the_stages_and_back_up() -> None:
    actions = INTERLEAVED_1F1B.order(0, 2, 4, 4)
    forward = [(one.stage, one.micro_batch) for one in actions if one.kind == "forward"]
    backward = [(one.stage, one.micro_batch) for one in actions if one.kind == "backward"]
    assert forward == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert backward == [(2, 0), (2, 1), (0, 0), (0, 1), (2, 2), (2, 3), (0, 2), (0, 3)]

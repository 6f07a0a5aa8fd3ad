"""1F1B: forwards and backwards alternate once a rank has warmed up, and few micro-batches are held at a time."""

from __future__ import annotations

import pytest

from onward.schedules.pipeline.one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from tests.schedules.pipeline.orders import assert_complete, most_held


@pytest.mark.parametrize(("size", "count"), [(1, 1), (2, 2), (3, 7), (4, 4)])
def test_every_rank(size: int, count: int) -> None:
    for rank in range(size):
        actions = ONE_FORWARD_ONE_BACKWARD.order(rank, size, count, size)
        assert_complete(actions, {rank}, count, ("forward", "backward"))
        assert most_held(actions) == min(size - rank, count)


def test_the_figure_of_the_paper() -> None:
    words = [f"{one.kind[0]}{one.micro_batch}" for one in ONE_FORWARD_ONE_BACKWARD.order(1, 3, 4, 3)]
    assert words == ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"]

"""A rank's highest moment, put together from its stages in the order of the schedule."""

from __future__ import annotations

import pytest

from onward.plan.costs.stage_cost import StageCost
from onward.plan.memory import StageFootprint, Traffic, estimated_footprint, rank_memory
from onward.plan.pipeline.schedules import simulate

HELD = {"weights": 10.0, "moments": 20.0, "gradients": 10.0}


def stage(kept: float, forward: float, backward: float, update: float = 0.0, received: float = 0.0) -> StageFootprint:
    return StageFootprint(
        held=HELD,
        kept={**HELD, "activations": kept},
        forward_peak={**HELD, "activations": kept, "working memory": forward},
        backward_peak={**HELD, "activations": kept, "working memory": backward},
        update_peak={**HELD, "working memory": update},
        received=(received, received),
    )


@pytest.mark.parametrize(
    ("forward", "backward", "update", "moment", "total"),
    [(9.0, 5.0, 1.0, "forward", 149.0), (5.0, 9.0, 1.0, "backward", 149.0), (5.0, 9.0, 200.0, "update", 240.0)],
)
def test_one_stage_is_highest_at_one_of_three_moments(
    forward: float, backward: float, update: float, moment: str, total: float
) -> None:
    memory = rank_memory({0: stage(100.0, forward, backward, update)}, 1, "1F1B")
    assert (memory.moment, memory.total, memory.kept) == (moment, total, (100.0,))


@pytest.mark.parametrize("pipeline", [0, 1, 2, 3])
def test_a_pipeline_rank_holds_as_many_micro_batches_as_its_schedule_says(pipeline: int) -> None:
    for schedule, held in (("1F1B", 4 - pipeline), ("GPipe", 8)):
        timeline = simulate(schedule, 4, 8, [StageCost()] * 4)  # type: ignore[arg-type]
        memory = rank_memory({pipeline: stage(100.0, 1.0, 7.0)}, 8, schedule, timeline.ranks[pipeline])  # type: ignore[arg-type]
        assert memory.kinds["activations"] == 100.0 * held
        assert memory.total == 40.0 + 100.0 * held + 7.0


def test_a_zero_bubble_schedule_frees_with_the_gradients_of_the_weights() -> None:
    timeline = simulate("ZBVZeroBubble", 2, 4, [StageCost()] * 4)
    memory = rank_memory({0: stage(1.0, 0.0, 0.0), 3: stage(1.0, 0.0, 0.0)}, 4, "ZBVZeroBubble", timeline.ranks[0])
    most = sum(timeline.peak_micro_batches[index] for index in (0, 3))
    assert 0 < memory.kinds["activations"] <= most
    assert memory.kinds["weights"] == 20.0, "two stages"


def test_buffers_are_kept_for_every_micro_batch() -> None:
    timeline = simulate("1F1B", 2, 4, [StageCost()] * 2)
    memory = rank_memory({1: stage(100.0, 0.0, 0.0, received=3.0)}, 4, "1F1B", timeline.ranks[1])
    assert memory.kinds["communication"] == 4 * 3.0


def test_an_estimate_shares_out_what_zero_does() -> None:
    print_ = estimated_footprint(120.0, 50.0, 2, 1, (4, 4, 1))
    assert print_.backward_peak == {"weights": 120.0, "moments": 60.0, "gradients": 30.0, "activations": 50.0}
    assert rank_memory({0: print_}, 1, "1F1B").total == 260.0


def test_what_is_sent_is_a_share_of_what_is_exchanged() -> None:
    traffic = Traffic(what="an all-reduce", calls=2.0, payload=100.0, ranks=4, share=1.5).times(3)
    assert (traffic.calls, traffic.payload, traffic.sent) == (6.0, 300.0, 450.0)

"""Schedules on paper: their orders are torch's own, and their bubbles those of the papers."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as of_torch

from onward.errors import ParametersError
from onward.parameters.distributed import PipelineSchedule
from onward.plan.costs.stage_cost import StageCost
from onward.plan.pipeline.schedules import (
    draw,
    ideal_bubble_share,
    order_of,
    rank_of_stage,
    simulate,
    stages_of_rank,
)
from onward.schedules.pipeline.actions import Action

KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}
SIZES = (2, 3, 4, 7, 8, 16)
EQUAL = StageCost(1.0, 1.0, 1.0)


class RecordingStage:
    """Stands for a stage of torch's, and writes down what it is told to compute. (Its `_get_pipeline_order`, made
    for drawings, begins 1F1B's last stage with micro-batch 1; what `step` does is right.)"""

    def __init__(self, index: int, count: int) -> None:
        self.stage_index, self.num_stages = index, count
        self.is_first, self.is_last, self.has_backward = index == 0, index == count - 1, True
        self.done: list[Action] = []

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.done.append(Action("forward", self.stage_index, number))

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self.done.append(Action("backward", self.stage_index, number))

    def perform_reduce_grad(self, factor: int) -> None:
        pass

    def get_fwd_recv_ops(self, number: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops


def torch_order(schedule: str, size: int, micro_batches: int, per_rank: int, rank: int) -> list[Action]:
    """What torch's schedule class does on a rank; made without processes."""
    kind: Any = getattr(of_torch, f"Schedule{schedule}")
    made = object.__new__(kind)
    made._n_microbatches = micro_batches
    made._num_stages = made.num_stages = size * per_rank
    if per_rank == 1:
        stage = made._stage = RecordingStage(rank, size)
        made._initialize_stage = made._maybe_compute_loss = made._maybe_get_loss = lambda *_: None
        made._update_losses, made.scale_grads = lambda *_: None, False
        made._step_microbatches()
        return stage.done
    made.pp_group_size, made.n_local_stages = size, per_rank
    made.microbatches_per_round = micro_batches // max(1, micro_batches // size)
    row = made._calculate_single_rank_operations(rank)
    found = [one for one in row if one is not None]
    return [Action(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in found]  # type: ignore[arg-type]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [
        ("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("InterleavedZeroBubble", 2),
        ("InterleavedZeroBubble", 4), ("ZBVZeroBubble", 2),
    ],
)  # fmt: skip
def test_the_order_is_the_one_that_torch_runs(schedule: PipelineSchedule, per_rank: int, size: int) -> None:
    for micro_batches in (size, 2 * size, 5 * size):
        ours = order_of(schedule, size, micro_batches, size * per_rank)
        for rank in range(size):
            assert list(ours[rank]) == torch_order(schedule, size, micro_batches, per_rank, rank)


@pytest.mark.parametrize("size", SIZES)
def test_stages_lie_on_the_ranks_where_torch_looks_for_them(size: int) -> None:
    for schedule, style in (("ZBVZeroBubble", "v"), ("Interleaved1F1B", "loop")):
        places = of_torch.generate_stage_to_rank_mapping(size, 2 * size, style=style)
        for stage in range(2 * size):
            assert rank_of_stage(schedule, size, stage) == places[stage]
    assert stages_of_rank("ZBVZeroBubble", size, 2 * size, 0) == (0, 2 * size - 1)
    assert stages_of_rank("Interleaved1F1B", size, 2 * size, 0) == (0, size)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_bubble_of_gpipe_and_1f1b_is_the_papers(schedule: PipelineSchedule, size: int) -> None:
    for micro_batches in (size, 2 * size, 4 * size):
        timeline = simulate(schedule, size, micro_batches, [EQUAL] * size)
        assert timeline.bubble_share == pytest.approx((size - 1) / (micro_batches + size - 1), abs=1e-9)
        assert ideal_bubble_share(schedule, size, micro_batches) == pytest.approx(timeline.bubble_share, abs=1e-9)


@pytest.mark.parametrize("per_rank", [2, 4])
@pytest.mark.parametrize("size", [2, 4, 8, 32])
def test_interleaving_divides_the_idle_time_by_the_stages_of_a_rank(size: int, per_rank: int) -> None:
    """Narayanan et al.: idle time over computing time is (p - 1) / (v m)."""
    for micro_batches in (size, 4 * size):
        timeline = simulate("Interleaved1F1B", size, micro_batches, [EQUAL] * (size * per_rank))
        idle_to_busy = timeline.bubble_share / (1 - timeline.bubble_share)
        assert idle_to_busy == pytest.approx((size - 1) / (per_rank * micro_batches), abs=1e-9)
        assert ideal_bubble_share("Interleaved1F1B", size, micro_batches, per_rank) == pytest.approx(
            timeline.bubble_share, abs=1e-9
        )


@pytest.mark.parametrize("size", [2, 4, 8, 32])
def test_zero_bubble_schedules_wait_less(size: int) -> None:
    """Qi et al.: ZB-V keeps only the wait before a rank's first micro-batch; ZB1P is below interleaved 1F1B."""
    micro_batches = 4 * size
    stages = [EQUAL] * (2 * size)
    v = simulate("ZBVZeroBubble", size, micro_batches, stages)
    # A rank computes 6 units a micro-batch, and rank r begins after r of them: nothing else is lost.
    assert v.seconds == pytest.approx(6 * micro_batches + size - 1)
    interleaved = simulate("Interleaved1F1B", size, micro_batches, stages)
    zero_bubble = simulate("InterleavedZeroBubble", size, micro_batches, stages)
    assert zero_bubble.seconds < interleaved.seconds


def test_stages_hold_as_many_micro_batches_as_the_papers_say() -> None:
    """1F1B: p - s of them on stage s; GPipe: all."""
    assert simulate("1F1B", 4, 16, [EQUAL] * 4).peak_micro_batches == (4, 3, 2, 1)
    assert simulate("GPipe", 4, 16, [EQUAL] * 4).peak_micro_batches == (16,) * 4
    v = simulate("ZBVZeroBubble", 4, 16, [EQUAL] * 8)
    for rank in range(4):  # 2 p activations of half a rank each: as much as the first rank of 1F1B
        assert sum(v.peak_micro_batches[s] for s in stages_of_rank("ZBVZeroBubble", 4, 8, rank)) <= 2 * 4 + 1


def test_a_slow_stage_and_slow_transfers_lengthen_the_update() -> None:
    even = simulate("1F1B", 4, 8, [EQUAL] * 4)
    uneven = simulate("1F1B", 4, 8, [EQUAL, StageCost(2.0, 2.0, 2.0), EQUAL, EQUAL])
    assert uneven.seconds >= 8 * 6.0 > even.seconds
    # One micro-batch of GPipe over 4 ranks: 3 transfers on the way up, 3 on the way back.
    assert simulate("GPipe", 4, 1, [EQUAL] * 4, transfer=0.5).seconds == pytest.approx(4 * 3 + 6 * 0.5)


def test_the_drawing_shows_who_waits() -> None:
    text = draw(simulate("GPipe", 2, 2, [StageCost(1, 0.5, 0.5)] * 2), width=6)
    assert text.splitlines() == [
        "rank  0 |01..ab|",
        "rank  1 |.01ab.|",
        "33.3% of the time is waiting; most micro-batches held by a stage: 2",
    ]
    v = draw(simulate("ZBVZeroBubble", 2, 4, [EQUAL] * 4))
    assert "=" in v
    assert "A" in v
    assert chr(0x1D7CE) in v


@pytest.mark.parametrize(
    ("schedule", "size", "stages", "micro_batches", "words"),
    [
        ("1F1B", 4, 4, 3, "needs at least 4 micro-batches for an update; there are 3"),
        ("1F1B", 4, 8, 8, "needs 4 stages, one for each process; there are 8"),
        ("ZBVZeroBubble", 2, 6, 8, "needs 4 stages, two for each process; there are 6"),
        ("Interleaved1F1B", 4, 6, 8, "needs a multiple of 4 stages, at least 8; there are 6"),
        ("InterleavedZeroBubble", 4, 8, 9, "in 2 rounds, and 9 cannot be shared out evenly"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    schedule: PipelineSchedule, size: int, stages: int, micro_batches: int, words: str
) -> None:
    with pytest.raises(ParametersError, match=words):
        order_of(schedule, size, micro_batches, stages)

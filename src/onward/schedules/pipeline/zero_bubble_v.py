"""ZB-V (arXiv 2401.10241): next to no bubble where forward and both backward parts take the same time, m >= 2 p - 1."""

from __future__ import annotations

from onward.schedules.pipeline.actions import Action, Counter
from onward.schedules.pipeline.kind import PipelineKind


def _order(rank: int, size: int, micro_batches: int, stage_count: int) -> tuple[Action, ...]:
    """ZB-V: a rank holds one stage on the way down and one on the way up, and forwards meet backwards between them."""
    most = max(2 * size - 1, micro_batches)
    down, up = rank, 2 * size - 1 - rank
    forward, inputs, weights = Counter("forward"), Counter("backward_input"), Counter("backward_weight")
    actions: list[Action] = []
    done = {down: 0, up: 0}

    def ahead(stage: int) -> None:
        actions.append(forward.on(stage))
        done[stage] += 1

    def back(stage: int) -> None:
        actions.append(inputs.on(stage))
        actions.append(weights.on(stage))

    for _ in range(2 * (size - rank) - 1):
        ahead(down)
    for _ in range(rank):
        ahead(up)
        ahead(down)
    for _ in range(size - rank):
        ahead(up)
        back(up)
    while done[up] < done[down] or done[down] < most:
        if done[down] < most:
            ahead(down)
        back(down)
        ahead(up)
        back(up)
    for _ in range(rank):
        actions += [inputs.on(down), inputs.on(up)]
    for _ in range(size - rank):
        back(down)
    actions += [weights.on(up) for _ in range(rank)]
    actions += [weights.on(down) for _ in range(rank)]
    return tuple(action for action in actions if action.micro_batch < micro_batches)


ZERO_BUBBLE_V = PipelineKind(
    name="ZBVZeroBubble",
    torch_class="ScheduleZBVZeroBubble",
    order=_order,
    stages_per_rank=2,
    turns_back=True,
    splits_backward=True,
)

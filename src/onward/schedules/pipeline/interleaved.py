"""Interleaved 1F1B (arXiv 2104.04473): v stages a rank, and a v-th of the idle time, (p - 1) / (v m + p - 1)."""

from __future__ import annotations

from onward.schedules.pipeline.actions import Action, Counter
from onward.schedules.pipeline.kind import PipelineKind


def interleaved(rank: int, size: int, micro_batches: int, stage_count: int, split: bool = False) -> tuple[Action, ...]:
    """Interleaved 1F1B; with `split`, weight gradients come so late that they fill what would be waiting (ZB1P)."""
    local = stage_count // size
    in_a_round = micro_batches // max(1, micro_batches // size)
    total = local * micro_batches
    warm_up = min((local - 1) * in_a_round + (1 if split else 2) * (size - 1 - rank), total)
    forward, weight = Counter("forward"), Counter("backward_weight")
    backward = Counter("backward_input" if split else "backward")

    def forward_stage(step: int) -> int:
        return (step // in_a_round) % local * size + rank

    def backward_stage(step: int) -> int:
        return (local - 1 - (step // in_a_round) % local) * size + rank

    actions = [forward.on(forward_stage(step)) for step in range(warm_up)]
    weights_done = 0
    for step in range(total):
        if warm_up + step < total:
            actions.append(forward.on(forward_stage(warm_up + step)))
        actions.append(backward.on(backward_stage(step)))
        if split and step >= rank:
            actions.append(weight.on(backward_stage(weights_done)))
            weights_done += 1
    if split:
        actions += [weight.on(backward_stage(step)) for step in range(weights_done, total)]
    return tuple(actions)


INTERLEAVED_1F1B = PipelineKind(
    name="Interleaved1F1B",
    torch_class="ScheduleInterleaved1F1B",
    order=interleaved,
    stages_per_rank=None,
    bubble_share=lambda p, m, v: (p - 1) / (v * m + p - 1),
    takes_groups=True,
)

"""1F1B as in PipeDream-flush (arXiv 2006.09503): GPipe's bubble, and at most p micro-batches held by a stage."""

from __future__ import annotations

from onward.schedules.pipeline.actions import Action
from onward.schedules.pipeline.kind import PipelineKind


def _order(rank: int, size: int, micro_batches: int, stage_count: int) -> tuple[Action, ...]:
    warm_up = size - 1 - rank
    actions = [Action("forward", rank, m) for m in range(warm_up)]
    for m in range(micro_batches - warm_up):
        actions += [Action("forward", rank, warm_up + m), Action("backward", rank, m)]
    actions += [Action("backward", rank, m) for m in range(micro_batches - warm_up, micro_batches)]
    return tuple(actions)


ONE_FORWARD_ONE_BACKWARD = PipelineKind(
    name="1F1B",
    torch_class="Schedule1F1B",
    order=_order,
    bubble_share=lambda p, m, v: (p - 1) / (m + p - 1),
    needs_one_for_each_rank=True,
)

"""GPipe (arXiv 1811.06965): all forward passes, then all backward passes; bubble (p - 1) / (m + p - 1)."""

from __future__ import annotations

from onward.schedules.pipeline.actions import Action
from onward.schedules.pipeline.kind import PipelineKind


def _order(rank: int, size: int, micro_batches: int, stage_count: int) -> tuple[Action, ...]:
    forward = [Action("forward", rank, m) for m in range(micro_batches)]
    return (*forward, *(Action("backward", rank, m) for m in range(micro_batches)))


GPIPE = PipelineKind(
    name="GPipe", torch_class="ScheduleGPipe", order=_order, bubble_share=lambda p, m, v: (p - 1) / (m + p - 1)
)

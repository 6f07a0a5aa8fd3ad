"""ZB1P, interleaved (arXiv 2401.10241): gradients of weights fill what would be waiting in interleaved 1F1B."""

from __future__ import annotations

import functools

from onward.schedules.pipeline.interleaved import interleaved
from onward.schedules.pipeline.kind import PipelineKind

INTERLEAVED_ZERO_BUBBLE = PipelineKind(
    name="InterleavedZeroBubble",
    torch_class="ScheduleInterleavedZeroBubble",
    order=functools.partial(interleaved, split=True),
    stages_per_rank=None,
    splits_backward=True,
    takes_groups=True,
)

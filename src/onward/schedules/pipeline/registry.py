"""The schedules that `distributed.pipeline_schedule` can name, in the order in which pages list them: a new one is a
line here."""

from __future__ import annotations

from onward.schedules.pipeline.gpipe import GPIPE
from onward.schedules.pipeline.interleaved import INTERLEAVED_1F1B
from onward.schedules.pipeline.interleaved_zero_bubble import INTERLEAVED_ZERO_BUBBLE
from onward.schedules.pipeline.kind import PipelineKind
from onward.schedules.pipeline.one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from onward.schedules.pipeline.zero_bubble_v import ZERO_BUBBLE_V

PIPELINES: tuple[PipelineKind, ...] = (
    ONE_FORWARD_ONE_BACKWARD,
    GPIPE,
    INTERLEAVED_1F1B,
    INTERLEAVED_ZERO_BUBBLE,
    ZERO_BUBBLE_V,
)


def pipeline_named(name: str) -> PipelineKind:
    """The schedule of a name that the parameters accepted."""
    return {kind.name: kind for kind in PIPELINES}[name]

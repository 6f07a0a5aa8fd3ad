"""Pipeline schedules on paper: which stages a rank holds, in which order it computes them, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onward.errors import ParametersError
from onward.parameters.distributed import PipelineSchedule
from onward.plan.costs.stage_cost import StageCost
from onward.schedules.pipeline.actions import Action, ActionKind
from onward.schedules.pipeline.registry import PIPELINES, pipeline_named

Rows = tuple[tuple[Action, ...], ...]

SPLITS_BACKWARD = frozenset(kind.name for kind in PIPELINES if kind.splits_backward)
"""Schedules that compute gradients of activations first and those of weights later."""

_WAITING = "."


@dataclass(frozen=True)
class Span:
    """An action with its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One update of a pipeline: what every rank computes when.

    Attributes:
        ranks: the spans of every rank, in order of time.
        seconds: from the first start to the last end, in the unit of the costs.
        bubble_share: how much of all ranks' time is waiting, from 0 to 1.
        peak_micro_batches: for every stage, the most micro-batches whose activations it holds at once.
        rank_of_stage: which rank computes each stage.
    """

    ranks: tuple[tuple[Span, ...], ...]
    seconds: float
    bubble_share: float
    peak_micro_batches: tuple[int, ...]
    rank_of_stage: tuple[int, ...]


def rank_of_stage(schedule: PipelineSchedule, pipeline_size: int, stage: int) -> int:
    """Which rank of the pipeline holds a stage: round and round, or forth and back."""
    turn, place = divmod(stage, pipeline_size)
    return pipeline_size - 1 - place if turn % 2 and pipeline_named(schedule).turns_back else place


def stages_of_rank(schedule: PipelineSchedule, pipeline_size: int, stage_count: int, rank: int) -> tuple[int, ...]:
    """The stages that one rank of the pipeline holds, in ascending order."""
    return tuple(s for s in range(stage_count) if rank_of_stage(schedule, pipeline_size, s) == rank)


def check_schedule(schedule: PipelineSchedule, pipeline_size: int, stage_count: int, micro_batches: int) -> None:
    """Checks that a schedule can run so many micro-batches over so many stages.

    Raises:
        ParametersError: the numbers do not fit; it says which do.
    """
    per_rank, rest = divmod(stage_count, pipeline_size)
    what = f"distributed.pipeline_schedule {schedule} over {pipeline_size} processes"
    kind = pipeline_named(schedule)
    if kind.stages_per_rank is None:
        wanted = f"a multiple of {pipeline_size} stages, at least {2 * pipeline_size}"
    else:
        count = {1: "one", 2: "two"}.get(kind.stages_per_rank, str(kind.stages_per_rank))
        wanted = f"{kind.stages_per_rank * pipeline_size} stages, {count} for each process"
    if rest or (per_rank < 2 if kind.stages_per_rank is None else per_rank != kind.stages_per_rank):
        raise ParametersError(f"{what} needs {wanted}; there are {stage_count}.")
    if kind.needs_one_for_each_rank and micro_batches < pipeline_size:
        raise ParametersError(
            f"{what} needs at least {pipeline_size} micro-batches for an update; there are {micro_batches}. "
            "Raise training.gradient_accumulation_steps, or use GPipe."
        )
    if kind.takes_groups:
        rounds = max(1, micro_batches // pipeline_size)
        if micro_batches % rounds:
            raise ParametersError(
                f"{what} takes micro-batches in {rounds} rounds, and {micro_batches} cannot be shared out evenly. "
                f"Set training.gradient_accumulation_steps to a multiple of {pipeline_size}."
            )


def order_of(
    schedule: PipelineSchedule, pipeline_size: int, micro_batches: int, stage_count: int | None = None
) -> Rows:
    """What every rank computes, in its own order; waiting is not in it.

    Raises:
        ParametersError: the schedule cannot run these numbers.
    """
    kind = pipeline_named(schedule)
    stage_count = stage_count or pipeline_size * (kind.stages_per_rank or 2)
    check_schedule(schedule, pipeline_size, stage_count, micro_batches)
    return tuple(kind.order(rank, pipeline_size, micro_batches, stage_count) for rank in range(pipeline_size))


def simulate(
    schedule: PipelineSchedule,
    pipeline_size: int,
    micro_batches: int,
    costs: Sequence[StageCost],
    transfer: float = 0.0,
) -> Timeline:
    """Runs a schedule on paper: every rank computes in its order as soon as what it needs is there.

    Args:
        schedule: which.
        pipeline_size: ranks of the pipeline.
        micro_batches: of one update.
        costs: of every stage.
        transfer: time for an activation or a gradient to reach another rank.

    Raises:
        ParametersError: the schedule cannot run these numbers.
    """
    rows = order_of(schedule, pipeline_size, micro_batches, len(costs))
    ranks = tuple(rank_of_stage(schedule, pipeline_size, stage) for stage in range(len(costs)))
    ended: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in rows]
    positions = [0] * len(rows)
    splits = schedule in SPLITS_BACKWARD
    while any(position < len(row) for position, row in zip(positions, rows, strict=True)):
        progress = False
        for rank, row in enumerate(rows):
            while positions[rank] < len(row):
                action = row[positions[rank]]
                needed = list(_needed_by(action, len(costs), splits))
                if any(other not in ended for other in needed):
                    break
                arrivals = [ended[o] + (transfer if ranks[o.stage] != rank else 0.0) for o in needed]
                start = max([spans[rank][-1].end if spans[rank] else 0.0, *arrivals])
                end = start + costs[action.stage].of(action.kind)
                spans[rank].append(Span(action, start, end))
                ended[action] = end
                positions[rank] += 1
                progress = True
        assert progress, f"{schedule} over {pipeline_size} ranks waits for itself"
    seconds = max(ended.values())
    busy = sum(span.end - span.start for row in spans for span in row)
    peaks = tuple(_peak(spans[ranks[stage]], stage, splits) for stage in range(len(costs)))
    share = 1.0 - busy / (seconds * pipeline_size) if seconds else 0.0
    return Timeline(
        ranks=tuple(map(tuple, spans)),
        seconds=seconds,
        bubble_share=share,
        peak_micro_batches=peaks,
        rank_of_stage=ranks,
    )


def _needed_by(action: Action, stage_count: int, splits: bool) -> Iterator[Action]:
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    backward: ActionKind = "backward_input" if splits else "backward"
    if kind == "forward":
        if stage > 0:
            yield Action("forward", stage - 1, micro_batch)
    elif kind == "backward_weight":
        yield Action("backward_input", stage, micro_batch)
    else:
        yield Action("forward", stage, micro_batch)
        if stage < stage_count - 1:
            yield Action(backward, stage + 1, micro_batch)


def _peak(spans: Sequence[Span], stage: int, splits: bool) -> int:
    """The most micro-batches between the start of their forward and the end of their (weights') backward."""
    last = "backward_weight" if splits else "backward"
    held = most = 0
    for span in spans:
        if span.action.stage == stage:
            held += span.action.kind == "forward"
            most = max(most, held)
            held -= span.action.kind == last
    return most


def ideal_bubble_share(
    schedule: PipelineSchedule, pipeline_size: int, micro_batches: int, stages_per_rank: int = 1
) -> float | None:
    """The bubble that the schedule's paper gives for equal stages, as a share of the time; None where none is given."""
    bubble_share = pipeline_named(schedule).bubble_share
    return None if bubble_share is None else bubble_share(pipeline_size, micro_batches, stages_per_rank)


def draw(timeline: Timeline, width: int = 100) -> str:
    """The timeline as text, a line for each rank: time runs to the right, one column is one share of `width`.

    Digits are forward passes, by the last digit of their micro-batch; letters (a for 0, b for 1, ...) are backward
    passes, `=` gradients of weights computed apart, dots waiting. Where a rank holds several stages, every other one
    is drawn in bold Unicode digits or capitals.
    """
    lines = []
    for rank, spans in enumerate(timeline.ranks):
        cells = [_WAITING] * width
        first = min((span.action.stage for span in spans), default=0)
        for span in spans:
            left = int(width * span.start / timeline.seconds + 0.5)
            right = max(left + 1, int(width * span.end / timeline.seconds + 0.5))
            for column in range(left, min(right, width)):
                cells[column] = _symbol(span.action, second=span.action.stage != first)
        lines.append(f"rank {rank:>2} |{''.join(cells)}|")
    lines.append(f"{timeline.bubble_share:.1%} of the time is waiting; most micro-batches held by a stage: "
                 f"{max(timeline.peak_micro_batches)}")  # fmt: skip
    return "\n".join(lines)


def _symbol(action: Action, second: bool) -> str:
    number = action.micro_batch % 10
    if action.kind == "forward":
        return chr(0x1D7CE + number) if second else str(number)
    if action.kind == "backward_weight":
        return "="
    letter = chr(ord("a") + number)
    return letter.upper() if second else letter

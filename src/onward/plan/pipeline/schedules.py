"""Pipeline schedules as plain data: which rank computes which stage of which micro-batch, in which order, and what that
costs. The orders are those of torch.distributed.pipelining, so that a timeline drawn here is the one that will run.

Sources: GPipe (arXiv 1811.06965), 1F1B as in PipeDream-flush (arXiv 2006.09503), interleaved 1F1B (arXiv 2104.04473),
zero bubble ZB1P and ZB-V (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onward.errors import ParametersError
from onward.parameters.distributed import PipelineSchedule
from onward.plan.costs.stage_cost import Kind, StageCost

Rows = tuple[tuple["Action", ...], ...]

SPLITS_BACKWARD = frozenset({"InterleavedZeroBubble", "ZBVZeroBubble"})
"""Schedules that compute gradients of activations first and those of weights later."""

_WAITING = "."


@dataclass(frozen=True)
class Action:
    """One computation of one micro-batch on one stage."""

    kind: Kind
    stage: int
    micro_batch: int


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
    """Which rank of the pipeline holds a stage: round and round, or forth and back for `ZBVZeroBubble`."""
    turn, place = divmod(stage, pipeline_size)
    return pipeline_size - 1 - place if schedule == "ZBVZeroBubble" and turn % 2 else place


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
    if schedule in ("1F1B", "GPipe"):
        expected = per_rank == 1 and rest == 0
        wanted = f"{pipeline_size} stages, one for each process"
    elif schedule == "ZBVZeroBubble":
        expected = per_rank == 2 and rest == 0
        wanted = f"{2 * pipeline_size} stages, two for each process"
    else:
        expected = per_rank >= 2 and rest == 0
        wanted = f"a multiple of {pipeline_size} stages, at least {2 * pipeline_size}"
    if not expected:
        raise ParametersError(f"{what} needs {wanted}; there are {stage_count}.")
    if schedule == "1F1B" and micro_batches < pipeline_size:
        raise ParametersError(
            f"{what} needs at least {pipeline_size} micro-batches for an update; there are {micro_batches}. "
            "Raise training.gradient_accumulation_steps, or use GPipe."
        )
    if schedule.startswith("Interleaved"):
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
    stage_count = stage_count or pipeline_size * (1 if schedule in ("1F1B", "GPipe") else 2)
    check_schedule(schedule, pipeline_size, stage_count, micro_batches)
    ranks = range(pipeline_size)
    if schedule == "GPipe":
        return tuple(
            tuple(Action(kind, rank, m) for kind in ("forward", "backward") for m in range(micro_batches))
            for rank in ranks
        )
    if schedule == "1F1B":
        return tuple(_one_forward_one_backward(rank, pipeline_size, micro_batches) for rank in ranks)
    if schedule == "ZBVZeroBubble":
        return tuple(_zero_bubble_v(rank, pipeline_size, micro_batches) for rank in ranks)
    split = schedule == "InterleavedZeroBubble"
    return tuple(_interleaved(rank, pipeline_size, micro_batches, stage_count, split) for rank in ranks)


def _one_forward_one_backward(rank: int, size: int, micro_batches: int) -> tuple[Action, ...]:
    warm_up = size - 1 - rank
    actions = [Action("forward", rank, m) for m in range(warm_up)]
    for m in range(micro_batches - warm_up):
        actions += [Action("forward", rank, warm_up + m), Action("backward", rank, m)]
    actions += [Action("backward", rank, m) for m in range(micro_batches - warm_up, micro_batches)]
    return tuple(actions)


class _Counter:
    """Numbers the micro-batches of each stage in the order in which one kind of action comes to them."""

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self._next: dict[int, int] = {}

    def on(self, stage: int) -> Action:
        number = self._next.get(stage, 0)
        self._next[stage] = number + 1
        return Action(self.kind, stage, number)


def _interleaved(rank: int, size: int, micro_batches: int, stage_count: int, split: bool) -> tuple[Action, ...]:
    """Interleaved 1F1B; with `split`, weight gradients come so late that they fill what would be waiting (ZB1P)."""
    local = stage_count // size
    in_a_round = micro_batches // max(1, micro_batches // size)
    total = local * micro_batches
    warm_up = min((local - 1) * in_a_round + (1 if split else 2) * (size - 1 - rank), total)
    forward, weight = _Counter("forward"), _Counter("backward_weight")
    backward = _Counter("backward_input" if split else "backward")

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


def _zero_bubble_v(rank: int, size: int, micro_batches: int) -> tuple[Action, ...]:
    """ZB-V: a rank holds one stage on the way down and one on the way up, and forwards meet backwards between them."""
    most = max(2 * size - 1, micro_batches)
    down, up = rank, 2 * size - 1 - rank
    forward, inputs, weights = _Counter("forward"), _Counter("backward_input"), _Counter("backward_weight")
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
    backward: Kind = "backward_input" if splits else "backward"
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
    """The bubble that the papers give for equal stages, as a share of the entire time; None where none is given.

    GPipe and 1F1B: (p - 1) / (m + p - 1). Interleaved: a v-th of the idle time, (p - 1) / (v m + p - 1). ZB-V: 0 where
    forward and both backward parts take the same time and m >= 2 p - 1.
    """
    p, m = pipeline_size, micro_batches
    if schedule in ("GPipe", "1F1B"):
        return (p - 1) / (m + p - 1)
    if schedule == "Interleaved1F1B":
        return (p - 1) / (stages_per_rank * m + p - 1)
    return None


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

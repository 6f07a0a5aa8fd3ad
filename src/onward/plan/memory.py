"""How much memory a rank needs at peak, by kind: what its stages need, put together in schedule order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from onward.graph.training_graph import TrainingGraph
from onward.parameters.distributed import PipelineSchedule
from onward.plan.costs.costs import GraphCosts, NodeCost
from onward.plan.pipeline.schedules import SPLITS_BACKWARD, Span, Timeline
from onward.plan.pipeline.stages import Stage, StagePlan
from onward.plan.rank import RankPlan

KINDS = (
    "weights", "frozen weights", "gathered weights", "low-precision copies", "gradients", "moments", "averages",
    "outer optimizer", "masks", "activations", "constants", "communication", "working memory",
)  # fmt: skip
"""Gathered weights: full ones that ZeRO keeps in parts. Outer optimizer: of local SGD, with the weights that were
synchronized last. Working memory: what is gone when its operator is done."""

Bytes = Mapping[str, float]
"""Kind -> bytes."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a rank communicates with others.

    Attributes:
        what: in words.
        calls: how many collectives.
        payload: bytes of the communicated tensors, unsharded.
        ranks: how many take part in each.
        share: of the payload that this rank sends: 2 (n - 1) / n for a ring all-reduce, (n - 1) / n for an all-gather
            or a reduce-scatter, 1 for a plain send.
    """

    what: str
    calls: float
    payload: float
    ranks: int
    share: float

    @property
    def sent(self) -> float:
        """Bytes that the rank sends."""
        return self.payload * self.share

    def times(self, count: float) -> Traffic:
        """So many of the same."""
        return Traffic(
            what=self.what, calls=self.calls * count, payload=self.payload * count, ranks=self.ranks, share=self.share
        )


@dataclass(frozen=True, kw_only=True)
class StageFootprint:
    """What one stage needs of one rank; every mapping holds everything that is alive at that moment, by kind.

    Attributes:
        held: between two micro-batches of an update.
        kept: when the forward pass of a micro-batch is done.
        forward_peak, backward_peak, update_peak: at the highest moments.
        received: bytes of one micro-batch from the stage before, those among them whose gradient travels back.
        sent: the same for the stage after.
        features: bytes of the inputs of the network that it reads, of one micro-batch.
        traffic_first, traffic_between, traffic_last: what the first micro-batch of an update communicates, each one
            between, and the last.
        problem: why it was not measured but estimated from the graph; empty if it was measured.
    """

    held: Bytes
    kept: Bytes
    forward_peak: Bytes
    backward_peak: Bytes
    update_peak: Bytes
    received: tuple[float, float] = (0.0, 0.0)
    sent: tuple[float, float] = (0.0, 0.0)
    features: float = 0.0
    traffic_first: tuple[Traffic, ...] = ()
    traffic_between: tuple[Traffic, ...] = ()
    traffic_last: tuple[Traffic, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class RankMemory:
    """A rank's memory at peak.

    Attributes:
        kinds: bytes by kind, in the order of `KINDS`.
        moment: when that is.
        kept: bytes that one micro-batch keeps for its backward pass, by stage of the rank.
    """

    kinds: Bytes
    moment: str
    kept: tuple[float, ...] = field(default=())

    @property
    def total(self) -> float:
        """All kinds together, in bytes."""
        return sum(self.kinds.values())


def rank_memory(
    footprints: Mapping[int, StageFootprint],
    micro_batches: int,
    schedule: PipelineSchedule,
    spans: Sequence[Span] = (),
) -> RankMemory:
    """The highest moment of a rank.

    Args:
        footprints: of its stages, by number.
        micro_batches: of one update.
        schedule: of the pipeline.
        spans: what the rank computes, in order; empty without a pipeline.
    """
    kept = tuple(sum(_minus(print_.kept, print_.held).values()) for print_ in footprints.values())
    if not spans:
        (only,) = footprints.values()
        moments = {"forward": only.forward_peak, "backward": only.backward_peak, "update": only.update_peak}
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        return RankMemory(_ordered(moments[moment]), moment, kept)
    held = _sum(print_.held for print_ in footprints.values())
    held = _sum([held, {"communication": _buffers(footprints, micro_batches)}])
    last = "backward_weight" if schedule in SPLITS_BACKWARD else "backward"
    alive: Bytes = held
    best, moment = held, "between two updates"
    for span in spans:
        stage, kind = footprints[span.action.stage], span.action.kind
        extra = _minus(stage.kept, stage.held)
        if kind == "forward":
            here = _sum([alive, _minus(stage.forward_peak, stage.held)])
            alive = _sum([alive, extra])
        else:
            here = _sum([alive, _minus(stage.backward_peak, stage.kept)])
            alive = _minus(alive, extra) if kind == last else alive
        if sum(here.values()) > sum(best.values()):
            name = kind.replace("_", " of the ").replace("backward of the ", "backward pass for the ")
            best, moment = here, f"{name} of micro-batch {span.action.micro_batch}"
    updates = [_minus(print_.update_peak, print_.held) for print_ in footprints.values()]
    update = _sum([held, max(updates, key=lambda one: sum(one.values()))])
    if sum(update.values()) > sum(best.values()):
        best, moment = update, "update"
    return RankMemory(_ordered(best), moment, kept)


def _buffers(footprints: Mapping[int, StageFootprint], micro_batches: int) -> float:
    """torch's pipelining keeps a buffer for everything that any micro-batch receives, activations and gradients."""
    return sum((one.received[0] + one.sent[1] + one.features) * micro_batches for one in footprints.values())


def _sum(parts: Iterable[Bytes]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for kind, size in part.items():
            total[kind] = total.get(kind, 0.0) + size
    return total


def _minus(left: Bytes, right: Bytes) -> dict[str, float]:
    return {kind: left.get(kind, 0.0) - right.get(kind, 0.0) for kind in {**left, **right}}


def _ordered(kinds: Bytes) -> dict[str, float]:
    return {kind: kinds.get(kind, 0.0) for kind in KINDS}


@dataclass(frozen=True)
class RankForecast:
    """All ranks at one place of the pipeline, which need the same.

    Attributes:
        pipeline: the place.
        memory: at the highest moment.
        traffic: of one update.
    """

    pipeline: int
    memory: RankMemory
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run will need.

    Attributes:
        ranks: one for each place of the pipeline; all ranks there need the same.
        footprints: of every stage.
        planned: the first rank with all stages of its pipeline.
        timeline: of one update of the pipeline, in operations.
        costs: of every node of the entire graph.
        inputs: name -> sizes and type in one micro-batch.
    """

    ranks: tuple[RankForecast, ...]
    footprints: Mapping[int, StageFootprint]
    planned: RankPlan
    timeline: Timeline | None
    costs: GraphCosts
    inputs: Mapping[str, str]

    @property
    def local(self) -> TrainingGraph:
        """The graph of the first rank, all stages in one."""
        return self.planned.local

    @property
    def stages(self) -> StagePlan | None:
        """Of the first rank's pipeline; None where there is one stage."""
        return self.planned.stages


def stage_cost(stage: Stage, costs: GraphCosts) -> NodeCost:
    """What a stage costs all its tensor-parallel ranks together; their collectives count nothing."""
    return costs.total(name for name in stage.nodes if name in costs.nodes)


def estimated_footprint(
    weight_bytes: float,
    kept_bytes: float,
    slots: float,
    micro_batches: int,
    zero_shares: tuple[int, int, int],
    averages: int = 0,
    outer: int = 0,
) -> StageFootprint:
    """A footprint counted from the graph alone, for networks that cannot be run without their data.

    Args:
        weight_bytes: of the stage's fp32 weights.
        kept_bytes: by the activations of a micro-batch (`onward.plan.costs.costs`).
        slots: tensors that the optimizer keeps for a weight.
        micro_batches: of one update.
        zero_shares: into how many parts ZeRO cuts moments, gradients and weights.
        averages: of the weights that the run keeps: 0 or 1.
        outer: tensors that local SGD keeps for a weight.
    """
    moments, gradients, weights = (weight_bytes / share for share in zero_shares)
    held = {"weights": weights, "moments": slots * moments, "gradients": gradients if micro_batches > 1 else 0.0}
    if averages:
        held["averages"] = averages * moments
    if outer:
        held["outer optimizer"] = outer * moments
    full = {**held, "gradients": gradients}
    kept = {**held, "activations": kept_bytes}
    return StageFootprint(
        held=held, kept=kept, forward_peak=kept, backward_peak={**full, "activations": kept_bytes}, update_peak=full
    )

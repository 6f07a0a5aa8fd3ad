"""`Layout`: one way to spread a run over ranks, the settings that all ways share, and the dimensions of the search.

A new dimension is a field of `Layout`, a row in `DIMENSIONS`, and its price.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onward.plan.search.hardware import Cluster
from onward.plan.search.network import NetworkWork
from onward.schedules.pipeline.registry import PIPELINES, pipeline_named


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What of a run's parameters the price of a layout depends on.

    Attributes:
        ranks: processes of the run.
        samples: of one update, of all replicas together.
        memory_bytes: of a rank, for tensors.
        precision: element type of matmuls: bf16, fp16 or fp32.
        slots: tensors that the optimizer keeps for a weight.
        gradient_bytes: of an element of a gradient while replicas reduce it.
        averages: of the weights that the run keeps.
        fuses_accumulation: whether matmuls add to gradients, as Megatron's do, instead of a pass over both.
        schedules: of pipelines that this torch can run.
        largest_batch: samples of a micro-batch, at most; None: an update's.
        kept: shares of activations that may be kept, from the fastest to the smallest; empty: those that the network
            allows.
        later_samples: of an update in each later round of the run, which has the same mesh.
        most_data: data-parallel ranks, at most, since each reads its own files of the data; None: any number.
        holds_received: whether every micro-batch of an update has its own buffers for what stages send, as in torch's
            pipelines.
    """

    ranks: int
    samples: int
    memory_bytes: float
    precision: str = "fp32"
    slots: float = 2.0
    gradient_bytes: float = 4.0
    averages: int = 0
    fuses_accumulation: bool = False
    schedules: tuple[str, ...] = ("1F1B",)
    largest_batch: int | None = None
    kept: tuple[float, ...] = ()
    later_samples: tuple[int, ...] = ()
    holds_received: bool = True
    most_data: int | None = None

    @property
    def width(self) -> float:
        """Bytes of an activation."""
        return 4.0 if self.precision == "fp32" else 2.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh, and what goes with them.

    Attributes:
        data, horizontal, pipeline: sizes of the mesh.
        context: replicas that share the sequences of the same samples.
        schedule: of the pipeline.
        stages_per_rank: of the pipeline.
        zero_stage: what replicas shard.
        zero_group: among how many of them in succession; 0: all.
        experts: replicas in succession that share the experts of every layer.
        sequence_parallel: whether tensor-parallel ranks share tokens, too.
        batch_size: samples of a micro-batch.
        micro_batches: of one update.
        kept: share of the activations' bytes that are kept; 0: those between segments only, 1: nothing is recomputed.
    """

    data: int = 1
    horizontal: int = 1
    pipeline: int = 1
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    zero_stage: int = 0
    zero_group: int = 0
    experts: int = 1
    sequence_parallel: bool = False
    batch_size: int = 1
    micro_batches: int = 1
    kept: float = 1.0
    context: int = 1

    @property
    def replicas(self) -> int:
        """Copies of the weights."""
        return self.data * self.context

    @property
    def sharers(self) -> int:
        """Replicas that ZeRO shards among."""
        return (self.zero_group or self.replicas) if self.zero_stage else 1

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.replicas * self.horizontal * self.pipeline

    @property
    def form(self) -> tuple[Any, ...]:
        """What is planned alike: all but micro-batches and recompute."""
        sizes = (self.data, self.context, self.horizontal, self.pipeline)
        sharing = (self.zero_stage, self.zero_group, self.experts, self.sequence_parallel)
        return (*sizes, self.schedule, self.stages_per_rank, *sharing)

    @property
    def complexity(self) -> tuple[float, ...]:
        """Of two layouts that take equally long the one with less is preferred."""
        return (
            self.pipeline * self.stages_per_rank,
            self.horizontal,
            self.context,
            self.experts,
            self.zero_stage,
            self.zero_group > 0,
            self.sequence_parallel,
            1 - self.kept,
            self.micro_batches,
        )

    def sections(self) -> dict[str, dict[str, Any]]:
        """The fields of RUN.yaml that ask for it."""
        distributed: dict[str, Any] = {"data_parallel_size": self.data, "horizontal_parallel_size": self.horizontal}
        distributed |= {"pipeline_parallel_size": self.pipeline, "zero_stage": self.zero_stage}
        if self.pipeline > 1:
            distributed["pipeline_schedule"] = self.schedule
            if pipeline_named(self.schedule).stages_per_rank is None:
                distributed["stages_per_rank"] = self.stages_per_rank
        if self.context > 1:
            distributed["context_parallel_size"] = self.context
        if self.experts > 1:
            distributed["expert_parallel_size"] = self.experts
        if self.zero_group:
            distributed["zero_group_size"] = self.zero_group
        if self.sequence_parallel:
            distributed["sequence_parallel"] = True
        found = {
            "distributed": distributed,
            "training": {"batch_size": self.batch_size, "gradient_accumulation_steps": self.micro_batches},
        }
        if self.kept < 1.0:
            found["recompute"] = {"segments": True} if self.kept == 0 else {"memory_budget": self.kept}
        return found

    def __str__(self) -> str:
        """As `onward plan` shows it."""
        context = f"{self.context} context x " if self.context > 1 else ""
        facts = [f"{self.data} data x {context}{self.horizontal} tensor x {self.pipeline} pipeline"]
        if self.pipeline > 1:
            more = f" ({self.stages_per_rank} stages a rank)" if self.stages_per_rank > 1 else ""
            facts.append(f"{self.schedule}{more}")
        facts += [f"experts over {self.experts}"] if self.experts > 1 else []
        groups = f" in groups of {self.zero_group}" if self.zero_group else ""
        facts += [f"ZeRO {self.zero_stage}{groups}"] if self.zero_stage else []
        facts += ["sequence parallel"] if self.sequence_parallel else []
        facts.append(f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} of {self.batch_size}")
        if self.kept < 1.0:
            facts.append("recompute" if self.kept == 0 else f"recompute all but {self.kept:.0%}")
        return ", ".join(facts)


Options = Callable[[Layout, NetworkWork, Cluster, Settings], Iterable[Layout]]


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [one for one in range(1, min(number, most or number) + 1) if number % one == 0]


def _tensor(layout: Layout, work: NetworkWork, cluster: Cluster, settings: Settings) -> Iterator[Layout]:
    """Inside of a node only: two all-reduces for every layer wait for the slowest link."""
    for size in work.tensor_sizes:
        if settings.ranks % size == 0 and (size == 1 or min(cluster.ranks_of_node, settings.ranks) % size == 0):
            yield dataclasses.replace(layout, horizontal=size)


def _tokens(layout: Layout, work: NetworkWork, cluster: Cluster, settings: Settings) -> Iterator[Layout]:
    yield layout
    if layout.horizontal > 1 and work.token_size % layout.horizontal == 0:
        yield dataclasses.replace(layout, sequence_parallel=True)


def _context(layout: Layout, work: NetworkWork, cluster: Cluster, settings: Settings) -> Iterator[Layout]:
    for size in (1, *work.context_sizes):
        if settings.ranks % (layout.horizontal * size) == 0 and (size == 1 or not layout.sequence_parallel):
            yield dataclasses.replace(layout, context=size)


def _pipeline(layout: Layout, work: NetworkWork, cluster: Cluster, settings: Settings) -> Iterator[Layout]:
    """Replicas are what is left; each needs a sample of every update, and its own files."""
    rest = settings.ranks // (layout.horizontal * layout.context)
    for size in _divisors(rest, work.blocks):
        if settings.most_data is not None and rest // size > settings.most_data:
            continue
        if all(samples % (rest // size) == 0 for samples in (settings.samples, *settings.later_samples)):
            yield dataclasses.replace(layout, pipeline=size, data=rest // size)


def _micro_batch(layout: Layout, work: NetworkWork, cluster: Cluster, settings: Settings) -> Iterator[Layout]:
    samples = settings.samples // layout.data
    sizes = _divisors(samples, settings.largest_batch)
    for size in sizes if len(sizes) <= _MOST_BATCHES else [*sizes[: _MOST_BATCHES - 1], sizes[-1]]:
        yield dataclasses.replace(layout, batch_size=size, micro_batches=samples // size)


_MOST_BATCHES = 16
_STAGES_PER_RANK = (2, 3, 4, 6, 8)


def _schedule(layout: Layout, work: NetworkWork, cluster: Cluster, settings: Settings) -> Iterator[Layout]:
    if layout.pipeline == 1:
        yield layout
        return
    size, micro_batches = layout.pipeline, layout.micro_batches
    # A pipeline has as many micro-batches in every round; they may be smaller than those that are priced.
    once = layout.data * micro_batches
    if any(samples % once or samples // once > layout.batch_size for samples in settings.later_samples):
        return
    for kind in PIPELINES:
        if kind.name not in settings.schedules or (kind.takes_groups and micro_batches % size):
            continue
        if kind.needs_one_for_each_rank and micro_batches < size:
            continue
        for count in _STAGES_PER_RANK if kind.stages_per_rank is None else (kind.stages_per_rank,):
            if size * count <= work.blocks:
                yield dataclasses.replace(layout, schedule=kind.name, stages_per_rank=count)


def _experts(layout: Layout, work: NetworkWork, cluster: Cluster, settings: Settings) -> Iterator[Layout]:
    for size in (1, *work.expert_sizes):
        if layout.replicas % size == 0:
            yield dataclasses.replace(layout, experts=size)


def _zero(layout: Layout, work: NetworkWork, cluster: Cluster, settings: Settings) -> Iterator[Layout]:
    """Among all replicas, those of a node, or those of a few nodes."""
    of_node = max(1, cluster.ranks_of_node // layout.horizontal)
    groups = [size for size in (of_node, of_node * _NODES_OF_GROUP) if 1 < size < layout.replicas]
    for stage in range(4 if layout.replicas > 1 else 1):
        if stage > 1 and layout.experts not in (1, layout.replicas):  # refused: an expert is on some of the replicas
            continue
        yield dataclasses.replace(layout, zero_stage=stage)
        for size in groups if stage else ():
            if layout.replicas % size == 0 and layout.experts == 1:
                yield dataclasses.replace(layout, zero_stage=stage, zero_group=size)


_NODES_OF_GROUP = 8


DIMENSIONS: Mapping[str, Options] = {
    "tensor parallel": _tensor,
    "sequence parallel": _tokens,
    "context parallel": _context,
    "pipeline and data parallel": _pipeline,
    "expert parallel": _experts,
    "micro-batch": _micro_batch,
    "schedule": _schedule,
    "ZeRO and its groups": _zero,
}
"""What is searched, the outermost first: partial layout -> the same with one more dimension."""


def layouts(work: NetworkWork, cluster: Cluster, settings: Settings) -> Iterator[Layout]:
    """All layouts that the network, the ranks and the schedules allow, recomputation left out."""

    def completed(layout: Layout, rows: tuple[Options, ...]) -> Iterator[Layout]:
        if not rows:
            yield layout
            return
        for one in rows[0](layout, work, cluster, settings):
            yield from completed(one, rows[1:])

    yield from completed(Layout(), tuple(DIMENSIONS.values()))

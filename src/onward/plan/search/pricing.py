"""`Pricing`: how long an update takes in a layout, and what a rank holds, from the arrays of a `NetworkWork`.

Operators take the longer of computing and moving bytes (the roofline of Williams et al., 2009). The bubble of a
pipeline is that of its schedule's paper or of its simulation; recompute and tensor parallelism cost what Narayanan et
al., 2021 (arXiv 2104.04473) and Korthikanti et al., 2022 (arXiv 2205.05198) count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from onward.errors import ParametersError
from onward.plan.communication import BUCKET_BYTES
from onward.plan.costs.stage_cost import StageCost
from onward.plan.pipeline.schedules import simulate
from onward.plan.search.hardware import Cluster
from onward.plan.search.layout import Layout, Settings
from onward.plan.search.network import NetworkWork, Numbers
from onward.plan.search.rank_work import RanksWork, RankWork
from onward.schedules.pipeline.registry import pipeline_named

EXPOSED_SENDS = 0.5
"""Share of what neighbors in a pipeline send that they wait for, since they compute while tensors travel."""

SPLIT_BACKWARD = 0.7
"""What schedules that take the gradients of inputs and of weights apart compute twice, as a share of the backward pass:
an autograd function of several gradients computes all of them in both. Measured: 0.8 to 0.9 in transformers, little
where one matmul dominates."""

UNIT_OPERATORS = 80.0
"""A pass of a micro-batch through a unit of `fully_shard` takes the host, forward and backward, as long as so many
operators: 1.6 ms where one takes 20 us, without what it waits for its collectives (linear layers of 8 x 8)."""

COMMUNICATION = ("tensor parallel", "tensor and context parallel", "pipeline transfers", "expert parallel", "replicas")
"""Kinds of seconds in which a rank communicates."""

USABLE_SHARE = 0.92
"""Of a rank's memory: allocators round up and leave gaps."""

_KINDS_OF_MEMORY = (
    "weights", "frozen weights", "weights in use", "gradients", "collective buffers", "moments", "averages",
    "activations", "pipeline buffers", "temporary",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a layout costs.

    Attributes:
        layout: which.
        seconds: of an update, by what they are spent on.
        memory: bytes of the rank with the highest peak, by kind.
        fits: whether that is within the limit.
        fullest: place in the pipeline of that rank.
    """

    layout: Layout
    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    fits: bool
    fullest: int = 0

    @property
    def total_seconds(self) -> float:
        """Of an update."""
        return sum(self.seconds.values())

    @property
    def total_bytes(self) -> float:
        """At peak."""
        return sum(self.memory.values())


def limit_bytes(cluster: Cluster, settings: Settings) -> float:
    """What tensors of a rank may take."""
    return settings.memory_bytes * USABLE_SHARE - cluster.device.reserved_bytes


def limit_words(cluster: Cluster, settings: Settings) -> str:
    """What of a rank's memory is taken off, for whom, and what is left: `60 GB of a rank less ...`."""
    memory, share = settings.memory_bytes, 1.0 - USABLE_SHARE
    return (
        f"{memory / 1e9:.3g} GB of a rank, less {share * memory / 1e9:.2g} GB ({share:.0%}) for what allocators round "
        f"up and {cluster.device.reserved_bytes / 1e9:.2g} GB for the driver and the libraries of collectives"
    )


def check_memory(cluster: Cluster, settings: Settings) -> None:
    """Refuses a limit of memory that leaves nothing for tensors.

    Raises:
        ParametersError: it does.
    """
    left = limit_bytes(cluster, settings)
    if left <= 0:
        least = cluster.device.reserved_bytes / USABLE_SHARE
        raise ParametersError(
            f"no memory is left for tensors: {limit_words(cluster, settings)}, leaves {left / 1e9:.3g} GB. Pass or set "
            f"more (--memory-gb, machine.memory_gb) than {least / 1e9:.3g} GB, use GPUs with more memory, or fewer "
            "ranks on a machine without GPUs."
        )


class Pricing:
    """Prices layouts of one network on one cluster; what layouts have in common is computed once.

    Args:
        work: of the network.
        cluster: what it runs on.
        settings: of the run.
    """

    def __init__(self, work: NetworkWork, cluster: Cluster, settings: Settings) -> None:
        self.work, self.cluster, self.settings = work, cluster, settings
        self._limit_bytes = limit_bytes(cluster, settings)
        self._rank_work = RankWork(work, cluster, settings)
        self._known_idle: dict[tuple[str, int, int, int], float] = {}
        self._known_held: dict[tuple[str, int, int, int], Numbers] = {}
        self._known: dict[Layout, Estimate] = {}

    def estimate(self, layout: Layout) -> Estimate:
        """Time and memory of a layout."""
        if layout not in self._known:
            ranks = self._rank_work.of(layout)
            memory, fullest = self._memory(layout, ranks, self._constant_memory(layout, ranks))
            self._known[layout] = self._timed(layout, memory, fullest)
        return self._known[layout]

    def least_recompute(self, layout: Layout, more_memory: float = 1.0) -> Estimate:
        """Keeping as much as fits; what does not fit at all is given with everything recomputed.

        Args:
            layout: of which `kept` is chosen.
            more_memory: how many times the memory that is counted for it it needs.
        """
        ranks = self._rank_work.of(layout)
        constant = self._constant_memory(layout, ranks)
        shares, limit = self.settings.kept or self.work.kept_shares, self._limit_bytes
        # Where what does not depend on activations is too much already, nothing fits.
        least = float(sum(constant.values()).max())  # type: ignore[union-attr]
        for kept in shares if least * more_memory <= limit else shares[-1:]:
            found = replace(layout, kept=kept)
            if found in self._known:
                memory, fullest = self._known[found].memory, self._known[found].fullest
            else:
                memory, fullest = self._memory(found, ranks, constant)
            fits = sum(memory.values()) * more_memory <= limit
            if fits:
                break
        if found not in self._known:
            self._known[found] = self._timed(found, memory, fullest)
        return replace(self._known[found], fits=fits)

    def _timed(self, layout: Layout, memory: Mapping[str, float], fullest: int) -> Estimate:
        seconds, fits = self._seconds(layout, self._rank_work.of(layout)), sum(memory.values()) <= self._limit_bytes
        return Estimate(layout=layout, seconds=seconds, memory=memory, fits=fits, fullest=fullest)

    # Time.

    def _seconds(self, layout: Layout, ranks: RanksWork) -> dict[str, float]:
        m, p = layout.micro_batches, layout.pipeline
        again = (ranks.forward + ranks.collectives / 2) * (1.0 - layout.kept)
        splits = p > 1 and pipeline_named(layout.schedule).splits_backward
        twice = ranks.split * (SPLIT_BACKWARD * splits)
        each = ranks.forward + ranks.backward + ranks.collectives + again + twice
        place = int(each.argmax())
        idle = self._idle_units(layout) * float(each.mean()) if p > 1 else 0.0
        found = {
            "compute": m * float(ranks.forward[place] + ranks.backward[place]),
            "recompute": m * float(again[place]),
            "split backward": m * float(twice[place]),
            "tensor parallel" if layout.context == 1 else "tensor and context parallel": m
            * float(ranks.collectives[place]),
            "pipeline bubble": idle,
            "pipeline transfers": 0.0,
        }
        if p > 1:
            stride, sends = layout.replicas * layout.horizontal, 2 * m * layout.stages_per_rank * EXPOSED_SENDS
            often, first = (self.cluster.send(size, stride) for size in (ranks.sent_mean, ranks.sent_bytes))
            found["pipeline transfers"] = often * sends + first * 2 * (p - 1)
        if layout.experts > 1:
            found["expert parallel"] = m * self._exchange_seconds(layout) / p
        found["replicas"] = self._replica_seconds(layout, ranks, place, again)
        held, experts = float(ranks.elements.max()), float(ranks.experts.max()) / layout.experts
        if not self.settings.fuses_accumulation:  # both are read, and the sum is written
            added = held / (layout.sharers if layout.zero_stage >= 2 else 1) + experts
            found["gradient accumulation"] = (m - 1) * 12.0 * added / self.cluster.device.bytes_per_second
        elements = held / layout.sharers + experts
        moved = elements * (4.0 + 8.0 * (1.0 + self.settings.slots))
        found["update"] = moved / self.cluster.device.bytes_per_second
        cores = self.cluster.cores
        if cores is not None:  # ranks that wait leave the cores to others; cores carry what ranks send, too
            times = min(layout.ranks, self.cluster.ranks_of_node) / cores
            busy = sum(found.values()) - idle - m * float(each[place] - each.mean())
            sent = sum(found.get(kind, 0.0) for kind in COMMUNICATION)
            least = (busy - sent) * times + sent * (1.0 if self.cluster.is_crowded else times)
            alone = sum(found.values())
            together = max(alone, least) if times <= 1 else math.hypot(alone**2, least**2) ** 0.5
            found["shared cores"] = together - alone
        return found

    def _exchange_seconds(self, layout: Layout) -> float:
        """Of a micro-batch: tokens to the ranks of their experts and back, forward and backward."""
        work = self.work
        if work.exchanged is None:
            return 0.0
        size = float(work.exchanged.sum()) * self.settings.width / work.width
        calls = 4.0 * float((work.exchanged > 0).sum())
        samples = layout.batch_size * self._rank_work.share_of_tokens(layout.context)
        return self.cluster.gather(size * samples, self.cluster.group(layout.experts, layout.horizontal), calls)

    def _replica_seconds(self, layout: Layout, ranks: RanksWork, place: int, again: Numbers) -> float:
        """What replicas and tensor-parallel ranks communicate about weights, unless hidden by computation."""
        cluster, settings = self.cluster, self.settings
        group = cluster.group(layout.replicas, layout.horizontal)
        forward = float((ranks.forward + ranks.collectives / 2)[place])
        backward = float((ranks.backward + ranks.collectives / 2 + again)[place])
        elements, units = float(ranks.elements.max()), max(1.0, float(ranks.units[place]))
        found = 0.0
        if layout.horizontal > 1:
            shared = cluster.group(layout.horizontal, 1)
            found += cluster.all_reduce(4.0 * float(ranks.full_elements.max()), shared)
        if layout.pipeline > 1:
            tied = sum(size for size, first, last in self.work.tied if last - first > self.work.blocks // 2)
            found += cluster.send(4.0 * tied / layout.horizontal, layout.replicas * layout.horizontal) if tied else 0.0
        if layout.replicas == 1:
            return found
        experts = 4.0 * float(ranks.experts.max()) / layout.experts
        if experts and layout.replicas > layout.experts:
            group_of_experts = cluster.group(layout.replicas // layout.experts, layout.horizontal * layout.experts)
            found += cluster.all_reduce(experts, group_of_experts)
        reduced = elements * settings.gradient_bytes
        if layout.zero_stage == 0:
            calls = 1.0 + reduced / BUCKET_BYTES
            return found + self._exposed(cluster.all_reduce(reduced, group, calls), backward, calls)
        group, groups = cluster.group(layout.sharers, layout.horizontal), layout.replicas // layout.sharers
        if groups > 1:  # each of them holds everything: what a rank has of the sums is added up over the groups
            over = cluster.group(groups, layout.horizontal * layout.sharers)
            summed = cluster.all_reduce(reduced / layout.sharers, over, units)
            found += self._exposed(summed, backward, units)
        # `fully_shard` copies weights out of the buffer that was gathered, and gradients into the one that is reduced.
        rate = cluster.device.bytes_per_second / 2.0
        gather = cluster.gather(elements * settings.width, group, units) + elements * settings.width / rate
        scatter = cluster.scatter(reduced, group, units) + reduced / rate
        if not cluster.device.is_asynchronous:  # else the host is ahead
            found += layout.micro_batches * units * UNIT_OPERATORS * cluster.device.operator_seconds
        if layout.zero_stage == 3:
            passes = self._exposed(gather, forward, units) + self._exposed(gather + scatter, backward, units)
            return found + layout.micro_batches * passes
        scatters = layout.micro_batches if layout.zero_stage == 2 else 1
        return found + self._exposed(gather, forward, units) + scatters * self._exposed(scatter, backward, units)

    def _exposed(self, seconds: float, window: float, units: float) -> float:
        """Communication left exposed by computation of `window` seconds; the first of its units never overlaps."""
        return max(seconds / units, seconds - self.cluster.overlap * window)

    def _idle_units(self, layout: Layout) -> float:
        """Time that a rank of the pipeline waits, in passes of a micro-batch through all of a rank's stages."""
        kind, p, m, v = pipeline_named(layout.schedule), layout.pipeline, layout.micro_batches, layout.stages_per_rank
        if kind.bubble_share is not None:
            share = kind.bubble_share(p, m, v)
            return m * share / (1.0 - share)
        small = min(p, 8)
        rounds = small * min(4, max(1, m // p))
        key = (kind.name, small, rounds, v)
        if key not in self._known_idle:
            timeline = simulate(kind.name, small, rounds, [StageCost(1.0, 1.0, 1.0)] * (small * v))
            self._known_idle[key] = timeline.bubble_share * timeline.seconds / (3.0 * v)
        return self._known_idle[key] * (p - 1) / max(1, small - 1)

    # Memory.

    def _constant_memory(self, layout: Layout, ranks: RanksWork) -> dict[str, Numbers]:
        """Of every rank of the pipeline, whatever share of the activations is kept."""
        settings, zero = self.settings, layout.zero_stage
        experts = ranks.experts / layout.experts
        sharded = ranks.elements / layout.sharers + experts
        is_lower = settings.width < 4.0
        copies = settings.width * ranks.elements if is_lower or zero else np.zeros(layout.pipeline)
        of_experts = settings.width * experts * is_lower
        units = ranks.largest_unit + ranks.elements / ranks.units
        received = (layout.micro_batches if settings.holds_received else 1) * layout.stages_per_rank
        return {
            "weights": 4.0 * sharded,
            "frozen weights": ranks.frozen * settings.width / self.work.width,
            "weights in use": (copies if zero < 3 else settings.width * units) + of_experts,
            "moments": 4.0 * settings.slots * sharded,
            "averages": 4.0 * settings.averages * sharded,
            "pipeline buffers": np.full(layout.pipeline, 2.0 * received * (layout.pipeline > 1) * ranks.sent_bytes),
            "temporary": 2.0 * ranks.made,
        }

    def _memory(
        self, layout: Layout, ranks: RanksWork, constant: Mapping[str, Numbers]
    ) -> tuple[dict[str, float], int]:
        """Of the rank with the highest peak, which `fully_shard` or DistributedDataParallel wraps; and its place."""
        settings, zero = self.settings, layout.zero_stage
        elements, m, experts = ranks.elements, layout.micro_batches, ranks.experts / layout.experts
        unit = ranks.largest_unit
        held = self._held(layout)
        kept = ranks.kept * held
        if layout.kept < 1.0:  # what is recomputed at a time is there once
            kept = np.minimum(kept, (ranks.kept * layout.kept + ranks.between) * held + ranks.largest)
        is_one_pass = m == 1 and layout.pipeline == 1 and (zero > 0 or layout.replicas == 1)
        is_scattered = zero >= 2 or (zero == 1 and is_one_pass)  # unit by unit, as soon as its gradients are there
        sharded = elements / layout.sharers + experts
        gradients = 4.0 * (sharded + unit if is_scattered else elements + experts)
        buffers = unit * (settings.gradient_bytes + settings.width * (zero == 3)) * (zero > 0)
        if is_one_pass:  # both appear while activations go
            gradients, buffers = np.maximum(gradients - kept, 0.0), np.maximum(buffers - kept, settings.width * unit)
        changing = {"gradients": gradients, "collective buffers": buffers * (zero > 0), "activations": kept}
        found = {kind: {**constant, **changing}[kind] for kind in _KINDS_OF_MEMORY}
        place = int(sum(found.values()).argmax())  # type: ignore[union-attr]
        return {name: float(values[place]) for name, values in found.items()}, place

    def _held(self, layout: Layout) -> Numbers:
        """Micro-batches whose activations each rank of the pipeline holds at once, at most."""
        p, v = layout.pipeline, layout.stages_per_rank
        if p == 1:
            return np.ones(1)
        kind = pipeline_named(layout.schedule)
        m = min(layout.micro_batches, 4 * p)
        key = (kind.name, p, m, v)
        if key not in self._known_held:
            last = "backward_weight" if kind.splits_backward else "backward"
            ends = []
            for rank in (0, p - 1):
                held = most = 0
                for action in kind.order(rank, p, m, p * v):
                    held += action.kind == "forward"
                    most = max(most, held)
                    held -= action.kind == last
                ends.append(most / v)
            self._known_held[key] = np.linspace(ends[0], ends[1], p)
        return self._known_held[key]

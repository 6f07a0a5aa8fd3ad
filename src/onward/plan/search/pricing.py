"""`Pricing`: how long an update takes in a layout, and what a rank holds, from the arrays of a `NetworkWork`.

Operators take the longer of computing and moving bytes (the roofline of Williams et al., 2009). The bubble of a
pipeline is that of its schedule's paper or of its simulation; recompute and tensor parallelism cost what Narayanan et
al., 2021 (arXiv 2104.04473) and Korthikanti et al., 2022 (arXiv 2205.05198) count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onward.plan.communication import BUCKET_BYTES
from onward.plan.costs.stage_cost import StageCost
from onward.plan.pipeline.schedules import rank_of_stage, simulate
from onward.plan.search.hardware import Cluster, Group
from onward.plan.search.layout import Layout, Settings
from onward.plan.search.network import NetworkWork, Numbers
from onward.plan.search.partition import best_cuts
from onward.schedules.pipeline.registry import pipeline_named

EXPOSED_SENDS = 0.5
"""Share of what neighbors in a pipeline send that they wait for, since they compute while tensors travel."""

USABLE_SHARE = 0.92
"""Of a rank's memory: allocators round up and leave gaps."""


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


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Per block, for one micro-batch of one rank: seconds of the passes, and bytes."""

    forward: Numbers
    backward: Numbers
    collectives: Numbers
    kept: Numbers
    segment: Numbers
    between: Numbers
    made: Numbers
    operators: Numbers


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """The same per rank of the pipeline, with its weights."""

    forward: Numbers
    backward: Numbers
    collectives: Numbers
    kept: Numbers
    between: Numbers
    largest: Numbers
    made: Numbers
    elements: Numbers
    full_elements: Numbers
    frozen: Numbers
    units: Numbers
    sent_bytes: float


def limit_bytes(cluster: Cluster, settings: Settings) -> float:
    """What tensors of a rank may take."""
    return settings.memory_bytes * USABLE_SHARE - cluster.device.reserved_bytes


class Pricing:
    """Prices layouts of one network on one cluster; what layouts have in common is computed once.

    Args:
        work: of the network.
        cluster: what it runs on.
        settings: of the run.
        more_memory: how many times the memory that is counted for a layout it needs.
    """

    def __init__(
        self,
        work: NetworkWork,
        cluster: Cluster,
        settings: Settings,
        more_memory: Callable[[Layout], float] = lambda layout: 1.0,
    ) -> None:
        self.work, self.cluster, self.settings, self._more_memory = work, cluster, settings, more_memory
        self._limit_bytes = limit_bytes(cluster, settings)
        self._known_blocks: dict[tuple[int, bool, int, int], _Blocks] = {}
        self._known_ranks: dict[tuple[int, bool, int, int, int, int, bool], _Ranks] = {}
        self._known_cuts: dict[tuple[int, bool], list[NDArray[np.int64]]] = {}
        self._known_idle: dict[tuple[str, int, int, int], float] = {}
        self._known_held: dict[tuple[str, int, int, int], Numbers] = {}

    def estimate(self, layout: Layout) -> Estimate:
        """Time and memory of a layout."""
        ranks = self._ranks(layout)
        memory, fullest = self._memory(layout, ranks)
        fits = sum(memory.values()) * self._more_memory(layout) <= self._limit_bytes
        seconds = self._seconds(layout, ranks)
        return Estimate(layout=layout, seconds=seconds, memory=memory, fits=fits, fullest=fullest)

    # Time.

    def _seconds(self, layout: Layout, ranks: _Ranks) -> dict[str, float]:
        m, p = layout.micro_batches, layout.pipeline
        again = (ranks.forward + ranks.collectives / 2) * (1.0 - layout.kept)
        each = ranks.forward + ranks.backward + ranks.collectives + again
        place = int(each.argmax())
        idle = self._idle_units(layout) * float(each.mean()) if p > 1 else 0.0
        found = {
            "compute": m * float(ranks.forward[place] + ranks.backward[place]),
            "recompute": m * float(again[place]),
            "tensor parallel" if layout.context == 1 else "tensor and context parallel": m
            * float(ranks.collectives[place]),
            "pipeline bubble": idle,
            "pipeline transfers": 0.0,
        }
        if p > 1:
            once = self.cluster.send(ranks.sent_bytes, layout.replicas * layout.horizontal)
            found["pipeline transfers"] = once * (2 * m * layout.stages_per_rank * EXPOSED_SENDS + 2 * (p - 1))
        found["replicas"] = self._replica_seconds(layout, ranks, place, again)
        held = float(ranks.elements.max())
        if not self.settings.fuses_accumulation:  # both are read, and the sum is written
            added = held / (layout.replicas if layout.zero_stage >= 2 else 1)
            found["gradient accumulation"] = (m - 1) * 12.0 * added / self.cluster.device.bytes_per_second
        elements = held / (layout.replicas if layout.zero_stage else 1)
        moved = elements * (4.0 + 8.0 * (1.0 + self.settings.slots))
        found["update"] = moved / self.cluster.device.bytes_per_second
        cores = self.cluster.cores
        if cores is not None:  # ranks that wait leave the cores to others
            used = min(layout.ranks, self.cluster.ranks_of_node)
            busy = m * float(each.mean()) + found["update"] + found.get("gradient accumulation", 0.0)
            least = busy * used / cores
            found["shared cores"] = max(0.0, least - sum(found.values()))
        return found

    def _replica_seconds(self, layout: Layout, ranks: _Ranks, place: int, again: Numbers) -> float:
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
        reduced = elements * settings.gradient_bytes
        if layout.zero_stage == 0:
            calls = 1.0 + reduced / BUCKET_BYTES
            return found + self._exposed(cluster.all_reduce(reduced, group, calls), backward, calls)
        # `fully_shard` copies weights out of the buffer that was gathered, and gradients into the one that is reduced.
        rate = cluster.device.bytes_per_second / 2.0
        gather = cluster.gather(elements * settings.width, group, units) + elements * settings.width / rate
        scatter = cluster.scatter(reduced, group, units) + reduced / rate
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

    # Work of the ranks of a pipeline.

    def _ranks(self, layout: Layout) -> _Ranks:
        v, p = layout.stages_per_rank, layout.pipeline
        turns = p > 1 and pipeline_named(layout.schedule).turns_back
        key = (layout.horizontal, layout.sequence_parallel, layout.context, layout.batch_size, p, v, turns)
        if key not in self._known_ranks:
            self._known_ranks[key] = self._make_ranks(layout)
        return self._known_ranks[key]

    def _make_ranks(self, layout: Layout) -> _Ranks:
        work, context = self.work, layout.context
        blocks = self._blocks(layout.horizontal, layout.sequence_parallel, layout.batch_size, context)
        p, count = layout.pipeline, layout.pipeline * layout.stages_per_rank
        cuts = self._cuts(layout)[count] if count > 1 else np.array([0, work.blocks])
        holder = np.array([rank_of_stage(layout.schedule, p, s) if p > 1 else 0 for s in range(count)])
        rank_of_block = np.repeat(holder, np.diff(cuts))

        def summed(values: Numbers) -> Numbers:
            return np.bincount(rank_of_block, values, p).astype(np.float64)

        def largest(values: Numbers) -> Numbers:
            found = np.zeros(p)
            np.maximum.at(found, rank_of_block, values)
            return found

        device = self.cluster.device
        forward, backward = summed(blocks.forward), summed(blocks.backward)
        host = summed(blocks.operators) * device.operator_seconds
        if device.is_asynchronous:  # the slower of host and device
            forward, backward = np.maximum(forward, host), np.maximum(backward, 2 * host)
        else:
            forward, backward = forward + host, backward + 2 * host
        shared, trained = work.of_blocks(work.trained_split), work.of_blocks(work.trained)
        full = trained - shared
        elements = summed(full + shared / layout.horizontal)
        for size, first, last in work.tied if count > 1 else ():
            if rank_of_block[first] != rank_of_block[last]:
                elements[rank_of_block[last]] += size / layout.horizontal
        factor = self.settings.width / work.width * layout.batch_size * self._share_of_tokens(context)
        return _Ranks(
            forward=forward,
            backward=backward,
            collectives=summed(blocks.collectives),
            kept=summed(blocks.kept),
            between=summed(blocks.between),
            largest=largest(blocks.segment),
            made=largest(blocks.made),
            elements=elements,
            full_elements=summed(full),
            frozen=summed(work.of_blocks(work.frozen)),
            units=summed((trained > 0).astype(np.float64) * work.is_narrow) + 1.0,
            sent_bytes=float(work.sent[cuts[1:-1] - 1].max()) * factor if count > 1 else 0.0,
        )

    def _share_of_tokens(self, context: int) -> float:
        """Of the work of a sample, what one of so many context ranks does."""
        return 1.0 - self.work.context_share * (1.0 - 1.0 / context)

    def _blocks(self, horizontal: int, by_tokens: bool, samples: int, context: int) -> _Blocks:
        key = (horizontal, by_tokens, samples, context)
        if key in self._known_blocks:
            return self._known_blocks[key]
        work, device = self.work, self.cluster.device
        batch = samples * self._share_of_tokens(context)
        factor = self.settings.width / work.width * batch
        share = np.where(work.is_token_split if by_tokens else work.is_split, horizontal, 1)
        weights_share = np.where(work.is_split, horizontal, 1)
        rate = device.operations_per_second[self.settings.precision]
        moving = (work.moved * factor / share + work.read * self.settings.width / work.width / weights_share) / (
            device.bytes_per_second
        )
        forward = np.maximum(work.forward * batch / share / rate, moving)
        backward = np.maximum(work.backward * batch / share / rate, 2 * moving * (work.kept + work.backward > 0))
        group, reduced = Group(horizontal, horizontal), (work.reduced_forward + work.reduced_backward) * factor
        seconds = np.zeros(len(reduced))
        for place in np.flatnonzero(reduced) if horizontal > 1 else ():
            calls = (work.reduced_forward[place] > 0) + (work.reduced_backward[place] > 0)
            seconds[place] = self.cluster.all_reduce(float(reduced[place]), group, float(calls))
        kept, collectives = work.of_blocks(work.kept / share) * factor, work.of_blocks(seconds)
        if context > 1:  # keys and values of all context ranks are gathered and kept, and their gradients reduced
            gathered = work.gathered * self.settings.width / work.width * samples / horizontal
            among, calls = self.cluster.group(context, horizontal), float(work.attentions)
            once = self.cluster.gather(gathered, among, calls) + self.cluster.scatter(gathered, among, calls)
            of_block = work.of_blocks(work.forward) / max(1.0, float(work.forward.sum()))
            collectives += once * of_block
            kept += gathered * (1.0 - 1.0 / context) * of_block
        segments = np.concatenate([[0], np.cumsum(work.is_narrow[:-1])])
        found = _Blocks(
            forward=work.of_blocks(forward),
            backward=work.of_blocks(backward),
            collectives=collectives,
            kept=kept,
            segment=np.bincount(segments, kept)[segments],
            between=work.sent * work.is_narrow * factor / (horizontal if by_tokens else 1),
            made=self._largest_made(share) * factor,
            operators=work.of_blocks(np.ones(len(work.block))),
        )
        self._known_blocks[key] = found
        return found

    def _largest_made(self, share: NDArray[np.int64]) -> Numbers:
        found = np.zeros(self.work.blocks)
        np.maximum.at(found, self.work.block, self.work.made / share)
        return found

    def _cuts(self, layout: Layout) -> list[NDArray[np.int64]]:
        """For every number of stages where they begin, at one sample: what sizes of batches cost differs too little."""
        key = (layout.horizontal, layout.sequence_parallel)
        if key not in self._known_cuts:
            blocks, cluster = self._blocks(*key, 1, 1), self.cluster
            link = cluster.between if self.settings.ranks > cluster.ranks_of_node else cluster.inside
            sent = self.work.sent * self.settings.width / self.work.width / link.bytes_per_second
            most = min(self.work.blocks, self.settings.ranks * 8)
            self._known_cuts[key] = best_cuts(blocks.forward + blocks.backward + blocks.collectives, 2 * sent, most)
        return self._known_cuts[key]

    # Memory.

    def _memory(self, layout: Layout, ranks: _Ranks) -> tuple[dict[str, float], int]:
        """Of the rank with the highest peak, which `fully_shard` or DistributedDataParallel wraps; and its place."""
        settings, zero, d = self.settings, layout.zero_stage, layout.replicas
        elements, m = ranks.elements, layout.micro_batches
        sharded = elements / (d if zero else 1)
        is_lower = settings.width < 4.0
        unit = elements / ranks.units
        copies = settings.width * elements if is_lower or zero else np.zeros(layout.pipeline)
        held = self._held(layout)
        kept = ranks.kept * held
        if layout.kept < 1.0:  # what is recomputed at a time is there once
            kept = np.minimum(kept, (ranks.kept * layout.kept + ranks.between) * held + ranks.largest)
        received = (m if settings.holds_received else 1) * layout.stages_per_rank * (layout.pipeline > 1)
        gradients = 4.0 * (elements if zero < 2 else sharded + unit)
        if m == 1 and layout.pipeline == 1 and (zero or d == 1):  # they appear while activations go
            gradients = np.maximum(gradients - kept, 0.0)
        found = {
            "weights": 4.0 * sharded,
            "frozen weights": ranks.frozen * settings.width / self.work.width,
            "weights in use": copies if zero < 3 else 2.0 * settings.width * unit,
            "gradients": gradients,
            "moments": 4.0 * settings.slots * sharded,
            "averages": 4.0 * settings.averages * sharded,
            "activations": kept,
            "pipeline buffers": np.full(layout.pipeline, 2.0 * received * ranks.sent_bytes),
            "temporary": 2.0 * ranks.made,
        }
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

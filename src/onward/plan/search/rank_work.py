"""`RankWork`: what every rank of a pipeline computes, communicates and holds, summed over a network's operators."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from onward.plan.costs.costs import OPERATIONS_PER_BYTE
from onward.plan.pipeline.balance import BYTES_MOVED_PER_BYTE_SENT
from onward.plan.pipeline.schedules import rank_of_stage
from onward.plan.search.hardware import Cluster, Device, Group
from onward.plan.search.layout import Layout, Settings
from onward.plan.search.network import NetworkWork, Numbers
from onward.plan.search.partition import best_cuts
from onward.schedules.pipeline.registry import pipeline_named

ACTION_OPERATORS = 60.0
"""A pass of a micro-batch through a stage takes torch's pipeline, on the host, as long as so many operators."""


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Per block, for one micro-batch of one rank: seconds of the passes, and bytes."""

    forward: Numbers
    backward: Numbers
    split: Numbers
    collectives: Numbers
    kept: Numbers
    segment: Numbers
    between: Numbers
    made: Numbers
    operators: Numbers


@dataclass(frozen=True, kw_only=True)
class RanksWork:
    """The same per rank of the pipeline, with its weights."""

    forward: Numbers
    backward: Numbers
    split: Numbers
    collectives: Numbers
    kept: Numbers
    between: Numbers
    largest: Numbers
    made: Numbers
    elements: Numbers
    experts: Numbers
    full_elements: Numbers
    frozen: Numbers
    units: Numbers
    largest_unit: Numbers
    sent_bytes: float
    sent_mean: float


@dataclass(frozen=True, kw_only=True)
class OperatorSeconds:
    """What each operator of a network takes a device for a micro-batch, by matmuls and by its memory."""

    matmuls_forward: Numbers
    matmuls_backward: Numbers
    memory_forward: Numbers
    memory_backward: Numbers

    @property
    def forward(self) -> Numbers:
        """Of the forward pass: the slower of both."""
        return np.maximum(self.matmuls_forward, self.memory_forward)

    @property
    def backward(self) -> Numbers:
        """Of the backward pass: the slower of both."""
        return np.maximum(self.matmuls_backward, self.memory_backward)


def operator_seconds(
    work: NetworkWork,
    device: Device,
    settings: Settings,
    samples: float,
    share: NDArray[np.int64] | int = 1,
    weights_share: NDArray[np.int64] | int = 1,
) -> OperatorSeconds:
    """Seconds of each operator, one after the other, without what the host takes to start them.

    Args:
        work: of the network.
        device: what computes.
        settings: of the run.
        samples: of the micro-batch.
        share, weights_share: ranks that share the activations and the weights of each operator.
    """
    rate, width = device.operations_per_second[settings.precision], settings.width / work.width
    moved = (work.moved * width * samples / share + work.read * width / weights_share) / device.bytes_per_second
    return OperatorSeconds(
        matmuls_forward=work.forward * samples / share / rate,
        matmuls_backward=work.backward * samples / share / rate,
        memory_forward=moved,
        memory_backward=2 * moved * work.passes_back,
    )


class RankWork:
    """Sums for layouts of one network on one cluster; what they have in common is computed once.

    Args:
        work: of the network.
        cluster: what it runs on.
        settings: of the run.
    """

    def __init__(self, work: NetworkWork, cluster: Cluster, settings: Settings) -> None:
        self.work, self.cluster, self.settings = work, cluster, settings
        self._known_blocks: dict[tuple[int, bool, int, int], _Blocks] = {}
        self._known_ranks: dict[tuple[int, bool, int, int, int, int, bool, bool], RanksWork] = {}
        self._segments = np.concatenate([[0], np.cumsum(work.is_narrow[:-1])])

    def of(self, layout: Layout) -> RanksWork:
        """Of every rank of a layout's pipeline."""
        v, p = layout.stages_per_rank, layout.pipeline
        turns = p > 1 and pipeline_named(layout.schedule).turns_back
        has_experts = layout.experts > 1
        key = (layout.horizontal, layout.sequence_parallel, layout.context, layout.batch_size, p, v, turns, has_experts)
        if key not in self._known_ranks:
            self._known_ranks[key] = self._make_ranks(layout)
        return self._known_ranks[key]

    def _make_ranks(self, layout: Layout) -> RanksWork:
        work, context = self.work, layout.context
        blocks = self._blocks(layout.horizontal, layout.sequence_parallel, layout.batch_size, context)
        p, count = layout.pipeline, layout.pipeline * layout.stages_per_rank
        cuts = self._cuts[count] if count > 1 else np.array([0, work.blocks])
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
        actions = ACTION_OPERATORS * layout.stages_per_rank if p > 1 else 0.0
        host = (summed(blocks.operators) + actions) * device.operator_seconds
        if device.is_asynchronous:  # the slower of host and device
            forward, backward = np.maximum(forward, host), np.maximum(backward, 2 * host)
        else:
            forward, backward = forward + host, backward + 2 * host
        shared, trained = work.of_blocks(work.trained_split), work.of_blocks(work.trained)
        full = trained - shared
        elements = summed(full + shared / layout.horizontal)
        of_experts = self._of_experts(layout)
        experts = summed(of_experts)
        for size, first, last in work.tied if count > 1 else ():
            if rank_of_block[first] != rank_of_block[last]:
                elements[rank_of_block[last]] += size / layout.horizontal
        factor = self.settings.width / work.width * layout.batch_size * self.share_of_tokens(context)
        return RanksWork(
            forward=forward,
            backward=backward,
            split=summed(blocks.split),
            collectives=summed(blocks.collectives),
            kept=summed(blocks.kept),
            between=summed(blocks.between),
            largest=largest(blocks.segment),
            made=largest(blocks.made),
            elements=elements - experts,
            experts=experts,
            full_elements=summed(full),
            frozen=summed(work.of_blocks(work.frozen)),
            units=summed((trained > 0).astype(np.float64) * work.is_narrow) + 1.0,
            largest_unit=self._largest_unit(full + shared / layout.horizontal - of_experts, rank_of_block, p),
            sent_bytes=float(work.sent[cuts[1:-1] - 1].max()) * factor if count > 1 else 0.0,
            sent_mean=float(work.sent[cuts[1:-1] - 1].mean()) * factor if count > 1 else 0.0,
        )

    def _largest_unit(self, elements: Numbers, rank_of_block: NDArray[np.int64], ranks: int) -> Numbers:
        """Elements of the weights of each rank's largest segment, as ZeRO gathers them."""
        of_rank = np.zeros((ranks, int(self._segments[-1]) + 1))
        np.add.at(of_rank, (rank_of_block, self._segments), elements)
        found: Numbers = of_rank.max(axis=1)
        return found

    def _of_experts(self, layout: Layout) -> Numbers:
        """Elements in each block, as a tensor-parallel rank holds them, of experts that replicas share."""
        work, horizontal = self.work, layout.horizontal
        if work.of_experts is None or layout.experts == 1:
            return np.zeros(work.blocks)
        split = work.trained_split / np.maximum(work.trained, 1.0)
        return work.of_blocks(work.of_experts * (1.0 - split * (1.0 - 1.0 / horizontal)))

    def share_of_tokens(self, context: int) -> float:
        """Of the work of a sample, what one of so many context ranks does."""
        return 1.0 - self.work.context_share * (1.0 - 1.0 / context)

    def _blocks(self, horizontal: int, by_tokens: bool, samples: int, context: int) -> _Blocks:
        key = (horizontal, by_tokens, samples, context)
        if key in self._known_blocks:
            return self._known_blocks[key]
        work, device = self.work, self.cluster.device
        batch = samples * self.share_of_tokens(context)
        factor = self.settings.width / work.width * batch
        share = np.where(work.is_token_split if by_tokens else work.is_split, horizontal, 1)
        weights_share = np.where(work.is_split, horizontal, 1)
        taken = operator_seconds(work, device, self.settings, batch, share, weights_share)
        forward, backward = taken.forward, taken.backward
        group, reduced = Group(horizontal, horizontal), (work.reduced_forward + work.reduced_backward) * factor
        seconds, reduce = np.zeros(len(reduced)), self.cluster.share_tokens if by_tokens else self.cluster.all_reduce
        for place in np.flatnonzero(reduced) if horizontal > 1 else ():
            calls = (work.reduced_forward[place] > 0) + (work.reduced_backward[place] > 0)
            seconds[place] = reduce(float(reduced[place]), group, float(calls))
        kept = work.of_blocks(work.kept / share) * factor + work.of_blocks(work.kept_once / weights_share)
        kept += work.of_blocks(work.kept_exactly / share) * max(0.0, batch - factor)
        collectives = work.of_blocks(seconds)
        if context > 1:  # keys and values of all context ranks are gathered and kept, and their gradients reduced
            gathered = work.gathered * self.settings.width / work.width * samples / horizontal
            among, calls = self.cluster.group(context, horizontal), float(work.attentions)
            once = self.cluster.gather(gathered, among, calls) + self.cluster.scatter(gathered, among, calls)
            of_block = work.of_blocks(work.forward) / max(1.0, float(work.forward.sum()))
            collectives += once * of_block
            kept += gathered * (1.0 - 1.0 / context) * of_block
        segments = self._segments
        found = _Blocks(
            forward=work.of_blocks(forward),
            backward=work.of_blocks(backward),
            split=work.of_blocks(backward * ~work.is_ahead),
            collectives=collectives,
            kept=kept,
            segment=np.bincount(segments, kept)[segments],
            between=work.sent * work.is_narrow * factor / (horizontal if by_tokens else 1),
            made=self._largest_made(share, factor),
            operators=work.of_blocks(np.ones(len(work.block))),
        )
        self._known_blocks[key] = found
        return found

    def _largest_made(self, share: NDArray[np.int64], factor: float) -> Numbers:
        """Half of the bytes that are there at a time; of a loss logits, and its gradient in fewer bits."""
        work, width, found = self.work, self.settings.width, np.zeros(self.work.blocks)
        lowered = work.kept_once * (width / 8.0 if width < 4.0 else 0.0)
        of_loss = work.kept_exactly * (factor * work.width / width) / 2.0
        np.maximum.at(
            found, work.block, np.maximum.reduce([work.made * factor, work.made_once + lowered, of_loss]) / share
        )
        return found

    @cached_property
    def _cuts(self) -> list[NDArray[np.int64]]:
        """For every number of stages where they begin, by the costs at one sample of the plan (`balanced_stages`).

        They are the same on any hardware and in any layout, as the plan's are.
        """
        work = self.work
        moving = OPERATIONS_PER_BYTE * work.moved
        cost = work.forward + work.backward + moving * (1.0 + (work.kept + work.backward > 0))
        sent = 2.0 * OPERATIONS_PER_BYTE * BYTES_MOVED_PER_BYTE_SENT * work.sent
        return best_cuts(work.of_blocks(cost), sent, min(work.blocks, self.settings.ranks * 8))

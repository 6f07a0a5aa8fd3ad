"""Where a graph is cut into segments: the layers between two points where one activation is all that is handed on.

A segment is the unit of recompute and of compilation, which joins those of a layer first; ZeRO shares out several at
once (`zero_units`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.cuts import find_cut_points, reads
from onward.graph.fusion.cross_entropy import FUSED_LOSS
from onward.graph.operators import Fact, has_fact
from onward.parameters.distributed import Recompute
from onward.plan.costs.costs import NodeCost
from onward.plan.costs.recompute import choose_for_budget, find_attention, split_at_attention
from onward.plan.zero_units import HeldWeight, ZeroUnit, choose_units, find_rows

MOST_JOINED_NODES = 400
"""Of neighbors that become one segment: with twice as many a first step takes up to a fifth longer."""

MOST_JOINED_BLOCKS = 4
"""Of equal ones that are joined like what does not repeat; of more, one or a few are a segment, compiled once."""

BLOCKS_COMPILED = {"cpu": 1, "cuda": 4}
"""Equal blocks of a segment at most: each call of a segment costs the host time, during which a GPU may wait."""


@dataclass(frozen=True, kw_only=True)
class SegmentPlan:
    """Which node and which weight belongs to which segment.

    Attributes:
        count: how many segments there are.
        segment_of: name of a node -> its segment, ascending in the order of the graph.
        readers: weight -> the segments that read it, ascending.
        recomputed: segments whose activations are recomputed for the backward pass.
        units: segments whose weights ZeRO communicates together; weights of none go with those of several.
    """

    count: int
    segment_of: Mapping[str, int]
    readers: Mapping[str, tuple[int, ...]]
    recomputed: frozenset[int]
    units: tuple[ZeroUnit, ...] = ()


def plan_segments(
    graph: ir.Graph,
    weights: Collection[str],
    is_cut: bool,
    recompute: Recompute,
    *,
    holds_loss: bool = True,
    is_stage: bool = False,
    blocks_joined: int = 0,
    joins_others: bool = False,
    joins_loss: bool = False,
    costs: Mapping[str, NodeCost] | None = None,
) -> SegmentPlan:
    """Cuts a graph at all of its cut points, where its parts are to be sharded, recomputed or compiled by themselves.

    Args:
        graph: prepared for lowering, with its loss; or a stage of a pipeline.
        weights: that train.
        is_cut: whether it is to be cut at all, recompute aside.
        recompute: what is asked for.
        holds_loss: whether the backward pass begins here, at once after the forward pass: then the last segment is
            needed first, and recomputing it would save nothing.
        is_stage: whether this is a stage of a pipeline, which may take several micro-batches before a backward pass.
        blocks_joined: how many neighbors of blocks that repeat become a segment, at most, as compiled code can be fused
            within one only; where nothing is recomputed, since that asks for small segments. 0: blocks are cut, too.
        joins_others: with it, whether neighbors of which none repeats, or only a few times, become one segment, too:
            each is compiled for itself anyway, and a call of one costs 0.2 ms.
        joins_loss: with it, whether the loss of the last layer is one of them; else it stays by itself, as on CPUs it
            is not compiled then.
        costs: of nodes, by the name of their first output; read for `recompute.memory_budget` only.
    """
    by_budget = recompute.memory_budget is not None
    points = find_cut_points(graph, weights) if is_cut or recompute.segments or by_budget else ()
    ends = [point.nodes_before for point in points]
    nodes = list(graph)
    coarse = [nodes[start:end] for start, end in zip([0, *ends], [*ends, len(nodes)], strict=True)]
    if blocks_joined and not (by_budget or recompute.segments or recompute.attention):
        alone = frozenset[str]() if joins_loss else frozenset({FUSED_LOSS})
        coarse = _joined(graph, coarse, weights, blocks_joined, joins_others, alone)
    is_apart = by_budget or (recompute.attention and not recompute.segments)
    attentions = find_attention(graph, weights) if is_apart else []
    parts, special = list[list[ir.Node]](), set[int]()
    for segment in coarse:
        found, inner = split_at_attention(segment, attentions)
        special |= {len(parts) + index for index in inner}
        parts += found
    segment_of, readers = assign(parts, weights)
    candidates = range(len(parts) - holds_loss)
    if by_budget:
        assert recompute.memory_budget is not None
        recomputed = choose_for_budget(parts, candidates, recompute.memory_budget, costs or {})
    else:
        wanted = candidates if recompute.segments else sorted(special)
        recomputed = frozenset(list(wanted)[: recompute.number_recompute_layers or len(parts)])
    units = choose_units(held_weights(graph, len(parts), readers), holds_loss and not is_stage)
    return SegmentPlan(count=len(parts), segment_of=segment_of, readers=readers, recomputed=recomputed, units=units)


def _joined(
    graph: ir.Graph,
    segments: Sequence[list[ir.Node]],
    weights: Collection[str],
    blocks: int,
    joins_others: bool,
    alone: Collection[str],
) -> list[list[ir.Node]]:
    """The nodes of segments, those of so many blocks that repeat together; where asked for, neighbors that do not.

    Segments that hold an operator of `alone` stay by themselves.
    """
    _, readers = assign(segments, weights)
    begin_of = {
        index: begin
        for first, period, count in find_rows(held_weights(graph, len(segments), readers))
        if count > MOST_JOINED_BLOCKS or not joins_others
        for size in [period * _together(count, blocks)]
        for begin in range(first, first + period * count, size)
        for index in range(begin, min(begin + size, first + period * count))
    }
    joined, last = list[list[ir.Node]](), None
    for index, nodes in enumerate(segments):
        is_single = index not in begin_of and joins_others and all(node.op_type not in alone for node in nodes)
        home = begin_of.get(index, "others" if is_single else None)
        is_full = home == "others" and joined and len(joined[-1]) + len(nodes) > MOST_JOINED_NODES
        if home is None or home != last or is_full:
            joined.append([])
        joined[-1] += nodes
        last = home
    return joined


def _together(count: int, most: int) -> int:
    """How many of `count` equal blocks become a segment: as few segments as there can be, of nearly equal size."""
    return math.ceil(count / math.ceil(count / most))


def assign(
    parts: Sequence[Sequence[ir.Node]], weights: Collection[str]
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """The segment of every node, and the segments that read each weight, directly or as a view of its memory."""
    segment_of: dict[str, int] = {}
    readers: dict[str, list[int]] = {name: [] for name in weights}
    views = {
        value: frozenset({str(value.name)})
        for nodes in parts
        for node in nodes
        for value in reads(node)
        if value.name in readers and value.is_initializer()
    }
    for segment, nodes in enumerate(parts):
        for node in nodes:
            segment_of[label_of(node)] = segment
            read = [
                views.get(value, frozenset()) for value in reads(node) if value.const_value is None or value in views
            ]
            for name in (found := frozenset[str]().union(*read)):
                if segment not in readers[name]:
                    readers[name].append(segment)
            # What is computed from weights alone may be a weight itself, like a transpose or a cast to its own type.
            shared = found if all(read) else read[0] if _may_be_view(node) else frozenset()
            views |= {value: shared for value in node.outputs if shared}
    return segment_of, {name: tuple(found) or (0,) for name, found in readers.items()}


def _may_be_view(node: ir.Node) -> bool:
    """Whether what a node gives may share memory with its first input."""
    return has_fact(node.op_type, Fact.SAME_ELEMENTS | Fact.VIEW) or node.op_type in ("Cast", "CastLike")


def held_weights(graph: ir.Graph, count: int, readers: Mapping[str, tuple[int, ...]]) -> list[list[HeldWeight]]:
    """The weights that only this segment reads, for each segment."""
    held: list[list[HeldWeight]] = [[] for _ in range(count)]
    for name, segments in readers.items():
        stored = graph.initializers[name].const_value if name in graph.initializers else None
        if len(segments) == 1 and stored is not None:
            shape = tuple(int(size) for size in stored.shape.numpy())
            held[segments[0]].append(HeldWeight(shape, stored.dtype.name))
    return held


def label_of(node: ir.Node) -> str:
    """The name by which the code of a node is known: its own, or that of its first output."""
    return str(node.name or (node.outputs[0].name if node.outputs else "") or "unnamed")

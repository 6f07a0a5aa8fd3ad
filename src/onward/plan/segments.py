"""Where a graph is cut into segments: the layers between two points where one activation is all that is handed on.

A segment is the unit of ZeRO's sharding, of recompute and of compilation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.cuts import find_cut_points, reads
from onward.parameter_distribution import Recompute


@dataclass(frozen=True)
class SegmentPlan:
    """Which node and which weight belongs to which segment.

    Attributes:
        count: how many segments there are.
        segment_of: name of a node -> its segment, ascending in the order of the graph.
        readers: weight -> the segments that read it, ascending.
        recomputed: segments whose activations are computed again for the backward pass.
    """

    count: int
    segment_of: Mapping[str, int]
    readers: Mapping[str, tuple[int, ...]]
    recomputed: frozenset[int]


def plan_segments(graph: ir.Graph, weights: Collection[str], is_cut: bool, recompute: Recompute) -> SegmentPlan:
    """Cuts a graph at all of its cut points, where its parts are to be sharded, recomputed or compiled by themselves.

    Args:
        graph: prepared for lowering, with its loss.
        weights: that train.
        is_cut: whether it is to be cut at all, recompute aside.
        recompute: what is asked for.
    """
    ends = [point.nodes_before for point in find_cut_points(graph, weights)] if is_cut or recompute.segments else []
    segment_of: dict[str, int] = {}
    readers: dict[str, list[int]] = {name: [] for name in weights}
    segment = 0
    for index, node in enumerate(graph):
        if segment < len(ends) and index >= ends[segment]:
            segment += 1
        segment_of[label_of(node)] = segment
        for value in reads(node):
            if value.name in readers and value.is_initializer() and segment not in readers[str(value.name)]:
                readers[str(value.name)].append(segment)
    recomputed = range(segment) if recompute.segments else range(0)  # the last is needed first: nothing would be saved
    limit = recompute.number_recompute_layers or segment
    return SegmentPlan(
        segment + 1,
        segment_of,
        {name: tuple(found) or (0,) for name, found in readers.items()},
        frozenset(list(recomputed)[:limit]),
    )


def label_of(node: ir.Node) -> str:
    """The name by which the code of a node is known: its own, or that of its first output."""
    return str(node.name or (node.outputs[0].name if node.outputs else "") or "unnamed")

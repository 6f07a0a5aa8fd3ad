"""The decision of tensor parallelism: which regions of a graph are cut, and why every other weight is unsharded."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from onward.errors import ParametersError
from onward.graph.operators import Fact, has_fact
from onward.graph.training_graph import TrainingGraph
from onward.graph.weights.names import WeightNames
from onward.plan.horizontal.cuts import AddBiasAfterReduce, Assignment, Edit, Sizes
from onward.plan.horizontal.indivisible_regions import IndivisibleRegion, check_divisibility
from onward.plan.horizontal.region_choice import choose_regions, clash, size_of
from onward.plan.horizontal.region_search import find_regions, weights_at
from onward.plan.horizontal.regions import MATMUL_OPERATORS, PartitioningContext, Region, find_seeds
from onward.plan.horizontal.tokens import TokenRegion, share_tokens
from onward.plan.shards import Sharding

_MOST_READERS = 64
"""Nodes that are looked at to find what a rearranged weight is for."""


@dataclass(frozen=True, kw_only=True)
class HorizontalPlan:
    """How `size` ranks share a graph. Nodes are named by their first output.

    Attributes:
        size: tensor-parallel ranks.
        shardings: initializer -> how it is cut: weights, running statistics, frozen weights.
        values: activation -> how it is cut.
        slices: (node, input) -> the part that it reads of a value which others read in full.
        edits: node -> how it is written for one rank.
        reduced: values that are partial sums: added up over the ranks in the forward pass.
        entries: (node, input) where a full value enters a region: its gradient is added up in the backward pass.
        partial_gradients: full weights whose gradient every rank has only a part of; the parts are to be added up
            over the tensor-parallel ranks before an update.
        reasons: trained weight that is not cut -> why.
        regions: for each region, the trained weights cut in it, in order.
        notes: for the user, one sentence each.
        token_axes: value between regions -> axis of its tokens, which the ranks share (`sequence_parallel`).
        token_gathers: (node, input) that reads all tokens of such a value, as every rank does.
        token_scatters: (node, input) that reads a rank's tokens of a value that is unsharded -> their axis.
    """

    size: int
    shardings: Mapping[str, Sharding] = field(default_factory=dict)
    values: Mapping[str, Sharding] = field(default_factory=dict)
    slices: Mapping[tuple[str, int], Sharding] = field(default_factory=dict)
    edits: Mapping[str, tuple[Edit, ...]] = field(default_factory=dict)
    reduced: tuple[str, ...] = ()
    entries: tuple[tuple[str, int], ...] = ()
    partial_gradients: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    regions: tuple[tuple[str, ...], ...] = ()
    token_axes: Mapping[str, int] = field(default_factory=dict)
    token_gathers: tuple[tuple[str, int], ...] = ()
    token_scatters: Mapping[tuple[str, int], int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def plan_horizontal(
    graph: TrainingGraph,
    size: int,
    shapes: Mapping[str, Sizes],
    numbers: Mapping[str, Any] | None = None,
    *,
    sequence_parallel: bool = False,
    allow_whole_layers: bool = False,
) -> HorizontalPlan:
    """Decides which weights of a graph are cut over so many ranks, and proves that the cut computes the same.

    Args:
        graph: with its loss.
        size: tensor-parallel ranks.
        shapes: sizes of the graph's values for one batch (`onward.lowering.building.shapes.find_value_facts`).
        numbers: shape arithmetic of the same.
        sequence_parallel: what is between cut layers of token sequences is shared by tokens (Korthikanti et al.,
            2022): reduce-scatter and all-gather instead of all-reduce, activations of one rank's tokens only.
        allow_whole_layers: layers whose heads, groups or channels `size` does not divide may stay unsharded.

    Raises:
        ParametersError: `size` does not divide the heads, groups or channels of layers that could be cut, nothing can
            be cut at all, or no tokens can be shared as asked.
    """
    if size == 1:
        return HorizontalPlan(size=1, reasons=dict.fromkeys(graph.weights, "there is one tensor-parallel rank"))
    partitioning = PartitioningContext(graph, shapes, numbers)
    candidates, indivisible, reasons = find_regions(partitioning, size, find_seeds(partitioning))
    chosen = choose_regions(candidates, graph)
    chosen += choose_regions(_with_norms_over_ranks(partitioning, size, chosen), graph)
    notes = _check_divisibility(graph, size, candidates, chosen, indivisible, allow_whole_layers)
    if not chosen:
        raise ParametersError(_nothing_to_cut(size, reasons, graph.known_as))
    for bias in _biases_after_sums(chosen):
        reasons.pop(bias, None)  # its own cut, tried and failed, is no reason: its layer is cut
    for region in candidates:
        if region not in chosen:
            rival = next((r for r in chosen if clash(r, region)), None)
            because = "another sharding saves more" if rival is None else _of_rival(rival, graph)
            for weight in region.weights(graph.weights):
                reasons.setdefault(str(weight.name), because)
    tokens = _share_tokens(partitioning, chosen, size) if sequence_parallel else TokenRegion()
    return replace(_write_plan(partitioning, size, chosen, reasons, tokens), notes=notes)


def common_size(graph: TrainingGraph, shapes: Mapping[str, Sizes], numbers: Mapping[str, Any]) -> int:
    """What sizes of tensor parallelism have to divide to share every layer that any size could; 1: there is none.

    Args:
        graph, shapes, numbers: as for `plan_horizontal`.
    """
    partitioning = PartitioningContext(graph, shapes, numbers)
    candidates, indivisible, _ = find_regions(partitioning, 2, find_seeds(partitioning))
    wanted = choose_regions([*candidates, *(found.region for found in indivisible)], graph)
    return math.gcd(*(count for region in wanted for count in region.counts().values())) or 1


def _check_divisibility(
    graph: TrainingGraph,
    size: int,
    candidates: Sequence[Region],
    chosen: Sequence[Region],
    indivisible: Sequence[IndivisibleRegion],
    allowed: bool,
) -> tuple[str, ...]:
    """Compares what is cut with what a size that divides everything would cut. Tables by vocabulary divide always."""
    wanted = choose_regions([*candidates, *(found.region for found in indivisible)], graph)
    cut = {str(weight.name) for region in chosen for weight in region.weights(graph.weights)}
    layers = {
        str(weight.name): size_of(weight)
        for region in (*wanted, *chosen)
        if not region.uneven
        for weight in region.weights(graph.weights)
    }
    common = math.gcd(*(count for region in wanted for count in region.counts().values()))
    return check_divisibility(
        size, [found for found in indivisible if found.region in wanted], common, layers, cut, allowed, graph.known_as
    )


def _biases_after_sums(regions: Sequence[Region]) -> set[str]:
    """What ranks add to a partial sum, each the entire term."""
    return {
        str(node.inputs[edit.input].name)  # type: ignore[union-attr]
        for region in regions
        for node, assignment in region.assignments.items()
        for edit in assignment.edits
        if isinstance(edit, AddBiasAfterReduce)
    }


def _share_tokens(partitioning: PartitioningContext, chosen: Sequence[Region], size: int) -> TokenRegion:
    tokens = share_tokens(partitioning, chosen, size)
    if tokens.axes:
        return tokens
    sums = [n for region in chosen for n, a in region.assignments.items() if a.partial]
    shapes = [partitioning.facts.shapes.get(str(node.outputs[0].name), ()) for node in sums]
    lengths = sorted({shape[1] for shape in shapes if len(shape) == 3})
    found = f"are of {', '.join(map(str, lengths))} tokens" if lengths else "have no axis of tokens"
    raise ParametersError(
        f"distributed.sequence_parallel is true, but {size} ranks cannot shard the activations between the sharded "
        f"layers: their sums {found}. Use sequences of a multiple of {size} tokens, or remove it."
    )


def _of_rival(rival: Region, graph: TrainingGraph) -> str:
    named = ", ".join(repr(graph.known_as.shown(str(weight.name))) for weight in rival.weights(graph.weights)[:3])
    return f"it could be sharded only instead of {named}, which hold more"


def _with_norms_over_ranks(partitioning: PartitioningContext, size: int, chosen: Sequence[Region]) -> list[Region]:
    """Regions of layers that no chosen region cuts, which become possible where the ranks reduce statistics."""
    cut = {str(weight.name) for region in chosen for weight in region.weights(partitioning.graph.weights)}
    seeds = [one for one in find_seeds(partitioning) if cut.isdisjoint(weights_at(partitioning, one[0]))]
    relaxed = copy(partitioning)
    relaxed.facts = replace(partitioning.facts, norms_over_ranks=True)
    found, _, _ = find_regions(relaxed, size, seeds)
    # One that ends in a mean alone, as that of a loss, leaves nothing to shard but the layer that it begins with.
    ends = ((region, [n.op_type for n, a in region.assignments.items() if a.partial]) for region in found)
    sound = [region for region, operators in ends if not MATMUL_OPERATORS.keys().isdisjoint(operators)]
    return [region for region in sound if not any(clash(region, one) for one in chosen)]


def _nothing_to_cut(size: int, reasons: Mapping[str, str], known_as: WeightNames) -> str:
    listed = (
        "; ".join(f"{known_as.shown(name)!r}: {reason}" for name, reason in list(reasons.items())[:3])
        or "it has no matmuls with weights"
    )
    return (
        f"distributed.horizontal_parallel_size is {size}, but no weight of the model can be sharded ({listed}). "
        "Set it to 1, and use data or pipeline parallelism."
    )


def _write_plan(
    partitioning: PartitioningContext, size: int, chosen: Sequence[Region], reasons: dict[str, str], tokens: TokenRegion
) -> HorizontalPlan:
    graph = partitioning.graph
    shardings: dict[str, Sharding] = {}
    values: dict[str, Sharding] = {}
    slices: dict[tuple[str, int], Sharding] = {}
    edits: dict[str, tuple[Edit, ...]] = {}
    reduced: list[str] = []
    edges: list[tuple[ir.Node, int]] = []
    for region in chosen:
        for value, cut in region.cuts.items():
            (shardings if value.is_initializer() else values)[str(value.name)] = cut
        slices.update({(_key(node), index): cut for (node, index), cut in region.slices.items()})
        for node in sorted(region.assignments, key=partitioning.order.__getitem__):
            assignment = region.assignments[node]
            if assignment.edits:
                edits[_key(node)] = assignment.edits
            if assignment.partial:
                reduced.append(str(node.outputs[0].name))
            edges.extend(_entries(partitioning, node, assignment))
            if assignment.partial and node.outputs[0] in tokens.axes:
                biases = [e.input for e in assignment.edits if isinstance(e, AddBiasAfterReduce)]
                edges.extend((node, i) for i in biases if partitioning.needs_gradient(node, i))
    for node, assignment in tokens.assignments.items():
        if assignment.edits:
            edits[_key(node)] = assignment.edits
        edges.extend(_entries(partitioning, node, assignment))
    slices.update({(_key(node), index): cut for (node, index), cut in tokens.slices.items()})
    full = _weights_only_in_regions(partitioning, edges)
    taken = {name for name in shardings if name in graph.weights}
    partial = tuple(name for name in graph.weights if name in full)
    left = [name for name in graph.weights if name not in taken]
    weights = partitioning.main.initializers
    return HorizontalPlan(
        size=size,
        shardings=shardings,
        values=values,
        slices=slices,
        edits=edits,
        reduced=tuple(reduced),
        entries=tuple((_key(n), i) for n, i in edges if _name(n, i) not in full),
        partial_gradients=partial,
        reasons={name: reasons.get(name) or _why_left(weights[name], partitioning.facts.from_inputs) for name in left},
        regions=tuple(tuple(str(w.name) for w in region.weights(graph.weights)) for region in chosen),
        token_axes={str(value.name): axis for value, axis in tokens.axes.items()},
        token_gathers=tuple((_key(node), index) for node, index in tokens.gathers),
        token_scatters={(_key(node), index): axis for (node, index), axis in tokens.scatters.items()},
    )


def _why_left(weight: ir.Value, from_inputs: Collection[str]) -> str:
    """Why a weight stays unsharded at which no region begins."""
    readers = [use.node for use in weight.uses()]
    for node in readers:  # exporters rearrange the weights of recurrent layers
        if len(readers) < _MOST_READERS and all(v is None or str(v.name) not in from_inputs for v in node.outputs):
            readers += [use.node for value in node.outputs for use in value.uses() if use.node not in readers]
    if any(has_fact(node.op_type, Fact.RECURRENT) for node in readers):
        return (
            "each step of a recurrent layer reads all hidden units of the step before, so that ranks that share them "
            "would communicate at every step"
        )
    return "it belongs to the operators between the sharded layers, which every rank computes in full"


def _entries(partitioning: PartitioningContext, node: ir.Node, assignment: Assignment) -> list[tuple[ir.Node, int]]:
    """Inputs of a node that are unsharded while it computes a part, so that their gradient is a part of a sum."""
    if not assignment.outputs and not assignment.partial:
        return []
    biases = {edit.input for edit in assignment.edits if isinstance(edit, AddBiasAfterReduce)}
    return [
        (node, index)
        for index, value in enumerate(node.inputs)
        if value is not None
        and index not in assignment.inputs
        and index not in biases
        and partitioning.needs_gradient(node, index)
    ]


def _weights_only_in_regions(partitioning: PartitioningContext, edges: Sequence[tuple[ir.Node, int]]) -> set[str]:
    """Whole weights that nothing but regions reads."""
    inside = set(edges)
    found = set()
    for name in partitioning.graph.weights:
        value = partitioning.main.initializers[name]
        uses = [(user, index) for user, index in value.uses()]
        if uses and all(use in inside for use in uses) and not value.is_graph_output():
            found.add(name)
    return found


def _key(node: ir.Node) -> str:
    return str(node.outputs[0].name)


def _name(node: ir.Node, index: int) -> str:
    value = node.inputs[index]
    assert value is not None
    return str(value.name)

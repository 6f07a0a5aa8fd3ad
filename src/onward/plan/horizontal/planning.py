"""The decision of tensor parallelism: which regions of a graph are cut, and why every other weight is unsharded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.plan.horizontal.cuts import AddBiasAfterReduce, Assignment, CannotShardError, Edit, Replace, Sizes
from onward.plan.horizontal.indivisible_regions import IndivisibleRegion, check_divisibility, find_indivisible_region
from onward.plan.horizontal.regions import MATMUL_OPERATORS, PartitioningContext, Region, find_seeds, grow
from onward.plan.horizontal.tokens import TokenRegion, share_tokens
from onward.plan.shards import Sharding

SMALLEST_CLASSES_PER_RANK = 8
"""Fewer classes or table rows a rank are not worth the collective."""

_MOST_SEARCHED = 16


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
        return HorizontalPlan(size=1, reasons=dict.fromkeys(graph.weights, "there is one horizontal rank"))
    partitioning = PartitioningContext(graph, shapes, numbers)
    candidates, indivisible, reasons = _find_regions(partitioning, size)
    chosen = _choose(candidates, graph)
    notes = _check_divisibility(graph, size, candidates, chosen, indivisible, allow_whole_layers)
    if not chosen:
        raise ParametersError(_nothing_to_cut(size, reasons))
    for bias in _biases_after_sums(chosen):
        reasons.pop(bias, None)  # its own cut, tried and failed, is no reason: its layer is cut
    for region in candidates:
        if region not in chosen:
            rival = next((r for r in chosen if _clash(r, region)), None)
            because = "another sharding saves more" if rival is None else _of_rival(rival, graph)
            for weight in region.weights(graph.weights):
                reasons.setdefault(str(weight.name), because)
    tokens = _share_tokens(partitioning, chosen, size) if sequence_parallel else TokenRegion()
    return replace(_write_plan(partitioning, size, chosen, reasons, tokens), notes=notes)


def _check_divisibility(
    graph: TrainingGraph,
    size: int,
    candidates: Sequence[Region],
    chosen: Sequence[Region],
    indivisible: Sequence[IndivisibleRegion],
    allowed: bool,
) -> tuple[str, ...]:
    """Compares what is cut with what a size that divides everything would cut. Tables by vocabulary divide always."""
    wanted = _choose([*candidates, *(found.region for found in indivisible)], graph)
    cut = {str(weight.name) for region in chosen for weight in region.weights(graph.weights)}
    layers = {
        str(weight.name): _size_of(weight)
        for region in (*wanted, *chosen)
        if not region.uneven
        for weight in region.weights(graph.weights)
    }
    common = math.gcd(*(count for region in wanted for count in region.counts().values()))
    return check_divisibility(
        size, [found for found in indivisible if found.region in wanted], common, layers, cut, allowed
    )


def _biases_after_sums(regions: Sequence[Region]) -> set[str]:
    """What ranks add to a sum of their parts, each the whole of it."""
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
    named = ", ".join(repr(weight.name) for weight in rival.weights(graph.weights)[:3])
    return f"it could be sharded only instead of {named}, which hold more"


def _find_regions(
    partitioning: PartitioningContext, size: int
) -> tuple[list[Region], list[IndivisibleRegion], dict[str, str]]:
    """Regions that `size` ranks can share; those that another number could; per weight why its own failed."""
    regions: list[Region] = []
    indivisible: list[IndivisibleRegion] = []
    reasons: dict[str, str] = {}
    for seed, axis in find_seeds(partitioning):
        grown = [*regions, *(found.region for found in indivisible)]
        if any(seed in r.cuts and r.cuts[seed].axis == axis for r in grown):
            continue
        names = _weights_at(partitioning, seed)
        try:
            region = grow(partitioning, seed, axis)
            reason = _why_not(partitioning, region, size)
        except CannotShardError as error:
            reason = error.reason
        if reason:
            for name in names:
                reasons.setdefault(name, reason)
        elif not any(region.cuts == other.cuts for other in grown):
            found = find_indivisible_region(region, region.weights(partitioning.graph.weights), size)
            if found is None:
                regions.append(region)
            else:
                indivisible.append(found)
    # What another size would cut is said before what no size can.
    reasons = {name: found.reason(size) for found in reversed(indivisible) for name in found.weights} | {
        name: reason for name, reason in reasons.items() if not any(name in found.weights for found in indivisible)
    }
    return regions, indivisible, reasons


def _weights_at(partitioning: PartitioningContext, seed: ir.Value) -> list[str]:
    """The trained weights whose product a seed is."""
    stack, found = [seed], []
    while stack:
        value = stack.pop()
        if value.is_initializer():
            found.append(str(value.name))
        node = value.producer()
        if node is not None and (value is seed or str(value.name) not in partitioning.facts.from_inputs):
            stack.extend(v for v in node.inputs if v is not None and str(v.name) not in partitioning.facts.from_inputs)
    return [name for name in found if name in partitioning.graph.weights]


def _why_not(partitioning: PartitioningContext, region: Region, size: int) -> str:
    """Why a sound region is not cut all the same; empty if it is."""
    weights = region.weights(partitioning.graph.weights)
    if not weights:
        return "no trainable weight would be sharded"
    ends = [a for a in region.assignments.values() if a.partial or (a.gathers and a.edits)]
    if not any(a.partial for a in ends) and not any(_is_loss(a) for a in ends):
        return "sharding it would end in gathering its result, with no second matmul to shard"
    return _why_not_worth_it(partitioning, region, size)


def _is_loss(assignment: Any) -> bool:
    return any(isinstance(edit, Replace) and edit.op_type.startswith("Sharded") for edit in assignment.edits)


def _why_not_worth_it(partitioning: PartitioningContext, region: Region, size: int) -> str:
    """Small tables and few classes cost more to exchange than they save."""
    if not region.uneven:
        return ""
    rows = max(sum(cut.blocks) for cut in region.cuts.values())
    if rows < SMALLEST_CLASSES_PER_RANK * size:
        return f"{rows} rows or classes are too few to be worth a collective between {size} ranks"
    multiplies = any(node.op_type in MATMUL_OPERATORS and not a.partial for node, a in region.assignments.items())
    if multiplies:
        return ""
    shapes = partitioning.facts.shapes
    summed = sum(math.prod(shapes[str(n.outputs[0].name)]) for n, a in region.assignments.items() if a.partial)
    held = sum(math.prod(shapes[str(w.name)]) for w in region.weights(partitioning.graph.weights))
    if held <= 2 * summed:
        return f"a table of {held} elements is too small to be worth all-reducing {summed} elements a step"
    return ""


def _choose(regions: Sequence[Region], graph: TrainingGraph) -> list[Region]:
    """Regions of which no two clash, with as many cut weight elements as possible: exactly for few, else greedily."""
    worth = {id(r): sum(_size_of(w) for w in r.weights(graph.weights)) for r in regions}
    clashes = {id(r): {id(o) for o in regions if o is not r and _clash(r, o)} for r in regions}
    chosen: list[Region] = []
    left = list(regions)
    while left:
        group, waiting = [], [left[0]]
        while waiting:
            region = waiting.pop()
            if region in group:
                continue
            group.append(region)
            waiting.extend(o for o in left if id(o) in clashes[id(region)])
        left = [r for r in left if r not in group]
        chosen.extend(_best_of(group, worth, clashes))
    return [r for r in regions if r in chosen]


def _size_of(weight: ir.Value) -> int:
    stored = weight.const_value
    return 0 if stored is None else int(stored.size)


def _best_of(group: list[Region], worth: Mapping[int, int], clashes: Mapping[int, set[int]]) -> list[Region]:
    ordered = sorted(group, key=lambda r: -worth[id(r)])
    if len(group) > _MOST_SEARCHED:
        taken: list[Region] = []
        for region in ordered:
            if not any(id(other) in clashes[id(region)] for other in taken):
                taken.append(region)
        return taken
    best: tuple[int, list[Region]] = (0, [])

    def search(place: int, total: int, taken: list[Region], rest: int) -> None:
        nonlocal best
        if total > best[0]:
            best = (total, list(taken))
        if place == len(ordered) or total + rest <= best[0]:
            return
        region = ordered[place]
        own = worth[id(region)]
        if not any(id(other) in clashes[id(region)] for other in taken):
            search(place + 1, total + own, [*taken, region], rest - own)
        search(place + 1, total, taken, rest - own)

    search(0, 0, [], sum(worth[id(r)] for r in ordered))
    return best[1]


def _clash(left: Region, right: Region) -> bool:
    """Whether two regions cut the same value or weight, or write the same node."""
    if any(value in right.cuts for value in left.cuts):
        return True
    return any(node in right.assignments for node in left.assignments)


def _nothing_to_cut(size: int, reasons: Mapping[str, str]) -> str:
    listed = (
        "; ".join(f"{name!r}: {reason}" for name, reason in list(reasons.items())[:3])
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
    return HorizontalPlan(
        size=size,
        shardings=shardings,
        values=values,
        slices=slices,
        edits=edits,
        reduced=tuple(reduced),
        entries=tuple((_key(n), i) for n, i in edges if _name(n, i) not in full),
        partial_gradients=partial,
        reasons={
            name: reasons.get(
                name, "it belongs to the operators between the sharded layers, which every rank computes in full"
            )
            for name in left
        },
        regions=tuple(tuple(str(w.name) for w in region.weights(graph.weights)) for region in chosen),
        token_axes={str(value.name): axis for value, axis in tokens.axes.items()},
        token_gathers=tuple((_key(node), index) for node, index in tokens.gathers),
        token_scatters={(_key(node), index): axis for (node, index), axis in tokens.scatters.items()},
    )


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

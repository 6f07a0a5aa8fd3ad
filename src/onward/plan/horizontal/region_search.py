"""Which regions so many ranks can share, which only other numbers of ranks could, and why the rest cannot be cut."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from dataclasses import replace

import onnx_ir as ir

from onward.plan.horizontal.cuts import Assignment, CannotShardError, Replace
from onward.plan.horizontal.indivisible_regions import IndivisibleRegion, find_indivisible_region
from onward.plan.horizontal.regions import MATMUL_OPERATORS, PartitioningContext, Region, find_seeds, grow

SMALLEST_CLASSES_PER_RANK = 8
"""Fewer classes or table rows a rank are not worth the collective."""


def find_regions(
    partitioning: PartitioningContext, size: int, seeds: Iterable[tuple[ir.Value, int]]
) -> tuple[list[Region], list[IndivisibleRegion], dict[str, str]]:
    """Regions that `size` ranks can share; those that another number could; per weight why its own failed."""
    regions: list[Region] = []
    indivisible: list[IndivisibleRegion] = []
    reasons: dict[str, str] = {}
    for seed, axis in seeds:
        grown = [*regions, *(found.region for found in indivisible)]
        if any(seed in r.cuts and r.cuts[seed].axis == axis for r in grown):
            continue
        region, found, reason = _grow_for(partitioning, size, seed, axis)
        if region is None:
            for name in weights_at(partitioning, seed):
                reasons.setdefault(name, reason)
        elif not any(region.cuts == other.cuts for other in grown):
            if found is None:
                regions.append(region)
            else:
                indivisible.append(found)
    # What another size would cut is said before what no size can.
    reasons = {name: found.reason(size) for found in reversed(indivisible) for name in found.weights} | {
        name: reason for name, reason in reasons.items() if not any(name in found.weights for found in indivisible)
    }
    return regions, indivisible, reasons


def _grow_for(
    partitioning: PartitioningContext, size: int, seed: ir.Value, axis: int
) -> tuple[Region | None, IndivisibleRegion | None, str]:
    """A region, what of it so many ranks cannot share, and why there is none."""
    seeds = [(seed, axis)]
    region, found, reason, has_parts = None, None, "", False
    try:
        region = grow(partitioning, seed, axis)
        reason = _why_not(partitioning, region, size)
    except CannotShardError as error:
        reason, has_parts = error.reason, error.hint is not None
    if region is not None and not reason:
        found = find_indivisible_region(region, region.weights(partitioning.graph.weights), size)
        if found is None:
            return region, None, ""
        seeds = [(v, a) for v, a in find_seeds(partitioning) if v in region.cuts and region.cuts[v].axis == a]
        has_parts = True
    replicated = _with_replicated_heads(partitioning, size, seeds) if has_parts else None
    if replicated is not None:
        return replicated, None, ""
    return (None if reason else region), found, reason


def _with_replicated_heads(
    partitioning: PartitioningContext, size: int, seeds: Iterable[tuple[ir.Value, int]]
) -> Region | None:
    """What can be cut after all, if ranks hold the same heads of keys and values where these are fewer than ranks."""
    relaxed = copy(partitioning)
    relaxed.facts = replace(partitioning.facts, replicating_ranks=size)
    for seed, axis in seeds:
        try:
            region = grow(relaxed, seed, axis)
        except CannotShardError:
            continue
        is_replicating = any(cut.parts for cut in region.cuts.values())
        weights = region.weights(partitioning.graph.weights)
        is_sound = is_replicating and not _why_not(partitioning, region, size)
        if is_sound and find_indivisible_region(region, weights, size) is None:
            return region
    return None


def weights_at(partitioning: PartitioningContext, seed: ir.Value) -> list[str]:
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
    rank_axes = {name: axis for one in partitioning.graph.adapters.values() for name, axis in one.rank_axes.items()}
    if any(region.cuts[weight].axis == rank_axes.get(str(weight.name)) for weight in weights):
        return "the rank of an adapter is too small to be worth a collective"
    ends = [a for a in region.assignments.values() if a.partial or (a.gathers and a.edits)]
    if not any(a.partial for a in ends) and not any(_is_loss(a) for a in ends):
        return "sharding it would end in gathering its result, with no second matmul to shard"
    return _why_not_worth_it(partitioning, region, size)


def _is_loss(assignment: Assignment) -> bool:
    return any(isinstance(edit, Replace) and edit.op_type.startswith("Sharded") for edit in assignment.edits)


def _why_not_worth_it(partitioning: PartitioningContext, region: Region, size: int) -> str:
    """Small tables and few classes cost more communication than they save."""
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

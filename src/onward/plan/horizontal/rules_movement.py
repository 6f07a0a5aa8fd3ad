"""Rules of what rearranges tensors: reshaping, transposing, joining, splitting, repeating."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from onward.plan.horizontal.cuts import (
    Assignment,
    CannotShardError,
    Edit,
    Known,
    Link,
    NodeContext,
    SetEntry,
    Sizes,
    broadcast_links,
    follow,
    joined,
    split_at,
    unlimited,
    within,
)
from onward.plan.horizontal.rules import rule
from onward.plan.shards import Sharding


@rule("Transpose")
def transpose(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Every axis."""
    rank = len(context.result())
    order = context.attribute("perm") or range(rank - 1, -1, -1)
    return follow([Link({0: int(axis)}, {0: place}) for place, axis in enumerate(order)], context, inputs, outputs)


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def reshape(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """An axis that is kept, split up (its outermost part is cut) or merged with others (in blocks)."""
    before, after = context.shape(0), context.result()
    given = inputs[0] if 0 in inputs else outputs[0]
    made = through_reshape(given, before, after) if 0 in inputs else through_reshape(given, after, before)
    if made is None:
        raise CannotShardError(
            f"{context.name} mixes the sharded axis {given.axis} with others: {list(before)} to {list(after)}"
        )
    own, result = (given, made) if 0 in inputs else (made, given)
    edits = _sizes_of_reshape(context, own, result) if context.node.op_type == "Reshape" else ()
    what = f"parts of axis {result.axis} of the result of {context.name}"
    own, result = _replicated_heads(context, own, result, outputs.get(0) or result)
    counts = () if own.blocks == result.blocks else tuple((block, what) for block in unlimited(own, result))
    finer = tuple((0, blocks) for blocks in _finer(own, before, after)) if 0 in inputs else ()
    return Assignment(inputs={0: own}, outputs={0: result}, counts=counts, edits=edits, finer=finer)


def _replicated_heads(
    context: NodeContext, own: Sharding, result: Sharding, asked: Sharding
) -> tuple[Sharding, Sharding]:
    """Where an axis is divided into fewer heads than there are ranks, or such are merged: the same parts of both."""
    count = min(len(own.blocks), len(result.blocks))
    if len(own.blocks) != len(result.blocks):
        parts = tuple(map(max, own.limits[:count], asked.limits[:count]))
        found = [replace(cut, parts=parts * (len(cut.blocks) // count)) for cut in (own, result)]
        if not all(made.has_limits_of(cut) for made, cut in zip(found, (own, asked), strict=True)):
            raise CannotShardError(f"{context.name} merges heads that are fewer than the ranks with another axis")
        return found[0], found[1]
    parts = tuple(
        limit or other or context.facts.parts(min(sizes)) if sizes[0] != sizes[1] else limit or other
        for limit, other, sizes in zip(
            own.limits, asked.limits, zip(own.blocks, result.blocks, strict=True), strict=True
        )
    )
    return replace(own, parts=parts), replace(result, parts=parts)


def _sizes_of_reshape(context: NodeContext, own: Sharding, result: Sharding) -> tuple[Edit, ...]:
    """The size of the cut axis is left to the operator (-1) where it can be: then it fits batches of any size."""
    length = len(context.result())
    target: int | str = 1 if context.version >= 5 else "shape"
    numbers = context.numbers(1) if context.version >= 5 else context.attribute("shape")
    if numbers is None:
        return (SetEntry(target, result.axis, result, length),)
    copied = numbers[result.axis] == 0 and not context.attribute("allowzero", 0)
    if numbers[result.axis] == -1 or (copied and own.axis == result.axis):
        return ()
    if -1 not in numbers:
        return (SetEntry(target, result.axis, None, length),)
    sizes = context.node.inputs[1]
    if len(result.blocks) > len(own.blocks) and sizes is not None and not sizes.is_initializer():
        raise CannotShardError(f"{context.name}: the size of its sharded axis may differ from batch to batch")
    return (SetEntry(target, result.axis, result, length),)


def through_reshape(cut: Sharding, before: Sizes, after: Sizes) -> Sharding | None:
    """The same cut seen through a reshape, or None where a rank's shard is no cut of the new shape.

    Axes are grouped by equal products; within a group, the parts of a rank are looked at as ranges of the flattened
    group, and an axis of the other side is sought whose cut has just those ranges; if several have, the one that can be
    shared by most ranks.
    """
    for old_axes, new_axes in _groups(before, after):
        if cut.axis in old_axes:
            ranges = _flatten(cut, [before[a] for a in old_axes], old_axes.index(cut.axis))
            sizes = [after[a] for a in new_axes]
            found = [(_unflatten(ranges, sizes, place), axis) for place, axis in enumerate(new_axes)]
            cuts = [Sharding(axis, blocks) for blocks, axis in found if blocks is not None]
            return max(cuts, key=lambda made: math.gcd(*made.blocks), default=None)
    return None


def _groups(before: Sizes, after: Sizes) -> list[tuple[list[int], list[int]]]:
    """Axes of both shapes in order, in the smallest groups of equal products."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = [], []
        left = right = 1
        if i < len(before):
            left, old, i = before[i], [i], i + 1
        if j < len(after):
            right, new, j = after[j], [j], j + 1
        while left != right:
            if left < right and i < len(before):
                left, i = left * before[i], i + 1
                old.append(i - 1)
            elif j < len(after):
                right, j = right * after[j], j + 1
                new.append(j - 1)
            else:
                break
        groups.append((old, new))
    return groups


def _flatten(cut: Sharding, sizes: list[int], place: int) -> Sizes:
    inner = math.prod(sizes[place + 1 :])
    return tuple(block * inner for block in cut.blocks) * math.prod(sizes[:place])


def _unflatten(ranges: Sizes, sizes: list[int], place: int) -> Sizes | None:
    """The blocks of one of several axes that flatten to these ranges."""
    outer, inner, own = math.prod(sizes[:place]), math.prod(sizes[place + 1 :]), sizes[place]
    if own == 1 or len(ranges) % outer:
        return None
    period = ranges[: len(ranges) // outer]
    if period * outer != ranges or any(length % inner for length in period):
        return None
    blocks = tuple(length // inner for length in period)
    return blocks if sum(blocks) == own else None


def _finer(cut: Sharding, before: Sizes, after: Sizes) -> list[Sizes]:
    """Other blocks of an axis that is split up: those that cut one of the inner parts."""
    found = []
    for old_axes, new_axes in _groups(before, after):
        if old_axes and [a for a in old_axes if before[a] > 1] == [cut.axis]:
            sizes = [after[a] for a in new_axes]
            for place in range(1, len(sizes)):
                if sizes[place] > 1 and math.prod(sizes[:place]) > 1:
                    found.append((math.prod(sizes[place:]),) * math.prod(sizes[:place]))
    return found


@rule("Expand")
def expand(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Every axis of the result, also one that is made by repeating."""
    found = follow(broadcast_links(context, [0]), context, inputs, outputs)
    cut, shape = found.outputs[0], context.shape(1)
    place = cut.axis - (len(context.result()) - shape[0])
    edits = (SetEntry(1, place, cut, shape[0]),) if place >= 0 else ()
    return Assignment(inputs=found.inputs, outputs=found.outputs, edits=edits)


@rule("Tile")
def tile(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Every axis that is not repeated."""
    before, after = context.shape(0), context.result()
    links = [Link({0: a}, {0: a}) for a in range(len(after)) if before[a] == after[a]]
    return follow(links, context, inputs, outputs, "repeated axis")


@rule("Concat")
def concat(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Other axes than its own in all operands; along its own, every operand is cut and the blocks are joined."""
    rank, operands = len(context.result()), range(len(context.node.inputs))
    own = context.axis("axis", 1, rank)
    if all(cut.axis != own for cut in (*inputs.values(), *outputs.values())):
        links = [Link(dict.fromkeys(operands, a), {0: a}) for a in range(rank) if a != own]
        return follow(links, context, inputs, outputs)
    if any(cut.axis != own for cut in (*inputs.values(), *outputs.values())):
        raise CannotShardError(f"{context.name}: its operands are sharded along different axes")
    ends = list(itertools.accumulate(context.shape(i)[own] for i in operands))
    cuts: dict[int, Sharding] = {}
    for index, end in zip(operands, ends, strict=True):
        start = end - context.shape(index)[own]
        if index in inputs:
            cuts[index] = inputs[index]
        elif 0 in outputs:
            found = within(outputs[0], start, end)
            if found is None:
                hint = split_at(outputs[0].blocks, ends)
                raise CannotShardError(f"{context.name}: a shard of its result crosses an operand's border", hint)
            cuts[index] = found
        elif end > start:
            cuts[index] = Sharding(own, natural_blocks(context, index, own))
    return Assignment(inputs=cuts, outputs={0: joined(own, (cuts[i] for i in operands if i in cuts))})


def natural_blocks(context: NodeContext, index: int, axis: int) -> Sizes:
    """How an operand that nothing is known of would be cut: in one block, or those of the parts it was joined from."""
    value = context.node.inputs[index]
    for _ in range(64):
        assert value is not None
        node = value.producer()
        if node is None:
            break
        inner = NodeContext(node, context.version, context.facts)
        if node.op_type == "Concat" and inner.axis("axis", 1, len(inner.result())) == axis:
            parts = [natural_blocks(inner, i, axis) for i in range(len(node.inputs))]
            return tuple(block for part in parts for block in part)
        value = node.inputs[0] if node.inputs else None
        passes = value is not None and str(value.name) in context.facts.shapes and node.op_type in _KEEPS_CHANNELS
        if not passes or inner.shape(0)[axis : axis + 1] != inner.result()[axis : axis + 1]:
            break
    return (context.shape(index)[axis],)


_KEEPS_CHANNELS = frozenset(
    {
        "Add", "AveragePool", "BatchNormalization", "Cast", "Clip", "Dropout", "Elu", "Gelu", "Identity",
        "InstanceNormalization", "LeakyRelu", "MaxPool", "Mul", "PRelu", "Relu", "Resize", "Sigmoid", "Tanh",
    }
)  # fmt: skip


@rule("Split")
def split(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Other axes than its own; along its own, the blocks are handed to the parts they are in."""
    rank = len(context.shape(0))
    own = context.axis("axis", 0, rank)
    parts = range(len(context.node.outputs))
    if all(cut.axis != own for cut in (*inputs.values(), *outputs.values())):
        links = [Link({0: a}, dict.fromkeys(context.outputs(), a)) for a in range(rank) if a != own]
        return follow(links, context, inputs, outputs)
    if any(cut.axis != own for cut in (*inputs.values(), *outputs.values())):
        raise CannotShardError(f"{context.name}: its outputs are sharded along different axes")
    sizes = [context.result(o)[own] for o in parts]
    ends = list(itertools.accumulate(sizes))
    cuts = {}
    for index, end in zip(parts, ends, strict=True):
        made: Sharding | None = outputs.get(index, Sharding(own, (sizes[index],)))
        if 0 in inputs:
            made = within(inputs[0], end - sizes[index], end)
            if made is not None and index in outputs and outputs[index].blocks == made.blocks and not made.parts:
                made = outputs[index]
        if made is None:
            hint = split_at(inputs[0].blocks, ends)
            raise CannotShardError(f"{context.name}: a shard of its operand crosses an output's border", hint)
        cuts[index] = made
    full = joined(own, (cuts[index] for index in parts))
    target: int | str | None = 1 if context.has_input(1) else "split" if "split" in context.node.attributes else None
    if target is None and len(set(sizes)) > 1:
        raise CannotShardError(f"{context.name} has outputs of different sizes that it does not list")
    edits = () if target is None else tuple(SetEntry(target, o, cuts[o], len(sizes)) for o in parts)
    counts = tuple((block, f"parts of {context.name}") for block in unlimited(*cuts.values()))
    return Assignment(inputs={0: full}, outputs=cuts, counts=counts, edits=edits)


@rule("Slice")
def slice_(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Axes that are not sliced; along one that is, full blocks."""
    before, after = context.shape(0), context.result()
    cut = inputs.get(0) or outputs[0]
    axis = cut.axis
    if before[axis] == after[axis]:
        return _full_slice(context, follow([Link({0: axis}, {0: axis})], context, inputs, outputs))
    bounds = _bounds(context, axis)
    start, end, step = slice(*bounds[:3]).indices(before[axis])
    if step != 1:
        every = f"{context.name} takes one of every {step} elements of the sharded axis, not of each group"
        return _interleaved(context, inputs, outputs, (start, bounds[1], step), every)
    sides = [Sharding(axis, (n,) if n else ()) for n in (start, before[axis] - end)]
    if 0 in inputs:
        found = within(inputs[0], start, end)
        ends = [within(inputs[0], 0, start), within(inputs[0], end, before[axis])]
        if found is None:
            hint = split_at(inputs[0].blocks, [start, end])
            raise CannotShardError(f"{context.name}: a shard of its operand crosses the slice's border", hint)
        sides = [side for side in ends if side is not None]
        if 0 in outputs and not found.parts and outputs[0].blocks == found.blocks:
            found = outputs[0]
    else:
        found = outputs[0]
    first, full = sides[0], joined(axis, (sides[0], found, sides[1]))
    place, length = bounds[3], bounds[4]
    targets: tuple[int | str, int | str] = (1, 2) if context.version >= 10 else ("starts", "ends")
    edits = (
        SetEntry(targets[0], place, first, length),
        SetEntry(targets[1], place, joined(axis, (first, found)), length),
    )
    return Assignment(inputs={0: full}, outputs={0: found}, edits=edits)


def _interleaved(
    context: NodeContext, inputs: Known, outputs: Known, bounds: tuple[int, int, int], every: str
) -> Assignment:
    """One element of each group of `step`: gates that alternate with what they gate. Ranks have full groups.

    Raises:
        CannotShardError: the slice begins after the first group, ends before the last, or crosses a block's border.
    """
    (start, end, step), axis = bounds, (inputs.get(0) or outputs[0]).axis
    length = context.shape(0)[axis]
    cut = inputs.get(0) or replace(outputs[0], blocks=tuple(block * step for block in outputs[0].blocks))
    is_of_all = 0 <= start < step and end >= length and length % step == 0
    if not is_of_all or any(block % step for block in cut.blocks):
        raise CannotShardError(every)
    result = replace(cut, blocks=tuple(block // step for block in cut.blocks))
    counts = tuple((block, f"groups of {context.name}") for block in unlimited(result))
    return Assignment(inputs={0: cut}, outputs={0: result}, counts=counts)


def _bounds(context: NodeContext, axis: int) -> tuple[int, int, int, int, int]:
    """Start, end and step along an axis, its place in the vectors of bounds, and their length."""
    if context.version >= 10:
        starts, ends = context.numbers(1), context.numbers(2)
        axes = context.numbers(3) if context.has_input(3) else None
        steps = context.numbers(4) if context.has_input(4) else None
    else:
        starts, ends, axes, steps = (
            context.attribute("starts"),
            context.attribute("ends"),
            context.attribute("axes"),
            None,
        )
    if starts is None or ends is None or (context.version >= 10 and context.has_input(3) and axes is None):
        raise CannotShardError(f"{context.name}: where it slices depends on data")
    rank = len(context.shape(0))
    places = [int(a) % rank for a in axes] if axes is not None else list(range(len(starts)))
    place = places.index(axis)
    return int(starts[place]), int(ends[place]), 1 if steps is None else int(steps[place]), place, len(places)


def _full_slice(context: NodeContext, found: Assignment) -> Assignment:
    """A slice of the full axis; bounds beyond a rank's shard are cut back to it, as the standard says."""
    try:
        step = _bounds(context, found.inputs[0].axis)[2]
    except (CannotShardError, ValueError):
        return found
    if step != 1:
        raise CannotShardError(f"{context.name} reverses the sharded axis")
    return found

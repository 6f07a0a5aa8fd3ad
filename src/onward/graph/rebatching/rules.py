"""Constants in which an exporter stored the batch size, rewritten for any: shapes, sizes, initial states, slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.structure import label
from onward.graph.rebatching.following import BATCH, BatchFollower, NotRebatched

_EVERYTHING = 2**63 - 1


def reshape(walk: BatchFollower, node: ir.Node) -> None:
    """The batch in the axis of a stored target shape that it goes into, and -1 for it."""
    data, given = node.inputs[0], walk.numbers(node, 1)
    axis, dims = walk.batch_axis(data), walk.dims(data)
    if given is None or axis is None or dims is None or _holds_batch(given):
        return
    target = [int(one) for one in given]
    if None in dims:
        if axis == 0 and target and target[0] == walk.size:
            walk.set_input(node, 1, np.asarray([0, *target[1:]], np.int64))
        return
    sizes = [int(one) for one in dims if one is not None]
    before = [size // BATCH * walk.size if place == axis else size for place, size in enumerate(sizes)]
    resolved = _resolve(target, before)
    outside = prod(before[:axis]) * walk.outside.get(data, 1)  # type: ignore[arg-type]
    place = None if resolved is None else _place(walk, resolved, before, axis, outside)
    if resolved is None or place is None:
        raise NotRebatched(f"{label(node)} moves the batch into other axes")
    walk.outside[node.outputs[0]] = outside // prod(resolved[:place])
    wanted = [size // walk.size * BATCH if at == place else size for at, size in enumerate(resolved)]
    if _resolve(target, sizes) != wanted:
        resolved[place] = -1
        walk.set_input(node, 1, np.asarray(resolved, np.int64))


def _place(walk: BatchFollower, target: list[int], sizes: list[int], axis: int, before: int) -> int | None:
    """The axis of a target shape into which the batch goes: with as many elements before it as now.

    Where several are possible, samples are rather not features (the last axis), nor an axis that stays as it was.
    """
    fitting = []
    for place, size in enumerate(target):
        outside = prod(target[:place])
        if outside and before % outside == 0 and size > 0 and size % (before // outside * walk.size) == 0:
            now = place - len(target) + len(sizes)
            stays = now >= 0 and now != axis and sizes[now] == size
            fitting.append((place == len(target) - 1, stays, outside != before, place))
    exact = [place for *_, place in fitting if target[place] == walk.size and prod(target[:place]) == before]
    if axis in exact:
        return axis
    return next(iter(exact), min(fitting)[-1] if fitting else None)


def unsqueeze(walk: BatchFollower, node: ir.Node) -> None:
    """A new axis where a batch of one was squeezed away: the samples come back out of the axis that they are in."""
    data, dims, axes = node.inputs[0], walk.dims(node.inputs[0]), _squeezed(walk, node)
    axis = walk.batch_axis(data)
    if data is None or axis is None or dims is None or axes is None or None in dims or dims[axis] == BATCH:
        return
    before = [int(size or 0) // (BATCH if place == axis else 1) for place, size in enumerate(dims)]
    added = {one % (len(dims) + len(axes)) for one in axes}
    rest = iter(before)
    target = [1 if place in added else next(rest) for place in range(len(dims) + len(axes))]
    place = _place(walk, target, before, axis, prod(before[:axis]) * walk.outside.get(data, 1))
    if walk.size == 1 and place in added:
        target[place] = -1
        _replace_by_reshape(walk, node, data, target)


def _replace_by_reshape(walk: BatchFollower, node: ir.Node, data: ir.Value, target: list[int]) -> None:
    output, op_type = node.outputs[0], node.op_type
    (new,) = walk.insert(node, "Reshape", [data, walk.constant(np.asarray(target, np.int64), "sizes")])
    output.replace_all_uses_with(new, replace_graph_outputs=True)
    name = output.name
    walk.graph.remove(node, safe=True)
    output.name, new.name = f"{name}/before", name
    new.type = output.type
    walk.changes[op_type] += 1


def squeeze(walk: BatchFollower, node: ir.Node) -> None:
    """A batch of one that is squeezed away becomes a factor of the axis behind it."""
    data, dims = node.inputs[0], walk.dims(node.inputs[0])
    axis = walk.batch_axis(data)
    if data is None or axis is None or dims is None or None in dims or dims[axis] != BATCH:
        return
    axes = _squeezed(walk, node)
    gone = (
        {one % len(dims) for one in axes}
        if axes is not None
        else {place for place, size in enumerate(dims) if size in (1, BATCH) and (size == 1 or walk.size == 1)}
    )
    if axis not in gone:
        return
    left = [int(size or 0) for place, size in enumerate(dims) if place not in gone]
    behind = sum(1 for place in range(axis) if place not in gone)
    if behind >= len(left):
        raise NotRebatched(f"{label(node)} removes the batch axis")
    left[behind] = -1
    _replace_by_reshape(walk, node, data, left)


def _squeezed(walk: BatchFollower, node: ir.Node) -> list[int] | None:
    given = node.attributes.get("axes")
    if given is not None:
        return list(given.as_ints())
    stored = walk.numbers(node, 1)
    return None if stored is None else [int(one) for one in stored.reshape(-1)]


def expand(walk: BatchFollower, node: ir.Node) -> None:
    """No number of samples in a stored target shape: what has the batch keeps it, what has not is broadcast."""
    given = walk.numbers(node, 1)
    data, dims = node.inputs[0], walk.dims(node.inputs[0])
    if data is None or given is None or dims is None:
        return
    if _holds_batch(given):
        along = int(np.flatnonzero((given > 0) & (given % BATCH == 0))[0]) - len(given) + len(dims)
        if along >= 0 and dims[along] == walk.size and walk.size > 1:
            node.replace_input_with(0, _first_of_equal(walk, node, data, along))
        return
    target, axis = [int(one) for one in given], walk.batch_axis(data)
    if axis is not None:
        place = axis + len(target) - len(dims)
        if place >= 0 and target[place] != 1:
            target[place] = 1
            walk.set_input(node, 1, np.asarray(target, np.int64))
    elif walk.size > 1 and target and target[0] == walk.size:
        walk.set_input(node, 1, np.asarray([1, *target[1:]], np.int64))


def slices(walk: BatchFollower, node: ir.Node) -> None:
    """A slice of all samples: to the end, whatever their number."""
    axis, dims = walk.batch_axis(node.inputs[0]), walk.dims(node.inputs[0])
    if axis is None or dims is None or walk.opset < 10:
        return
    starts, ends, axes, steps = (walk.numbers(node, place) for place in (1, 2, 3, 4))
    if starts is None or ends is None:
        return
    named = [int(one) % len(dims) for one in (range(len(starts)) if axes is None else axes)]
    if axis not in named:
        return
    place = named.index(axis)
    size = (dims[axis] or 0) // BATCH * walk.size
    if int(starts[place]) == 0 and size <= int(ends[place]) < BATCH and (steps is None or int(steps[place]) == 1):
        changed = ends.astype(np.int64).copy()
        changed[place] = _EVERYTHING if ends.dtype == np.int64 else np.iinfo(np.int32).max
        walk.set_input(node, 2, changed.astype(ends.dtype))


def concat(walk: BatchFollower, node: ir.Node) -> None:
    """What is the same for all samples is repeated for each, where it meets what is not."""
    axes = [walk.batch_axis(value) for value in node.inputs]
    batched = next((axis for axis in axes if axis is not None), None)
    if batched is None or node.outputs[0] in walk.known:
        return
    dims = walk.dims(node.inputs[axes.index(batched)])
    given = node.attributes.get("axis")
    if dims is None or given is None:
        return
    if given.as_int() % len(dims) == batched:
        if all(value in walk.known or len(dims) == 1 for value in node.inputs):
            return
        raise NotRebatched(f"{label(node)} appends along the batch axis")
    for place, axis in enumerate(axes):
        sizes = walk.dims(node.inputs[place])
        if axis is None and sizes is not None and sizes[batched] == 1:
            node.replace_input_with(place, walk.repeat(node, node.inputs[place], batched, len(sizes)))
            walk.changes["Concat"] += 1


def recurrent(walk: BatchFollower, node: ir.Node) -> None:
    """Initial states that are the same for all samples are repeated for each."""
    if walk.batch_axis(node.inputs[0]) is None:
        return
    layout = node.attributes.get("layout")
    axis = 1 if layout is None or layout.as_int() == 0 else 0
    if walk.batch_axis(node.inputs[0]) != axis:
        raise NotRebatched(f"{label(node)} iterates along the batch axis")
    for place, along, rank in ((4, 0, 1), (5, axis, 3), (6, axis, 3)):
        value = node.inputs[place] if len(node.inputs) > place else None
        if value is None or walk.batch_axis(value) is not None:
            continue
        if walk.size > 1:
            value = _first_of_equal(walk, node, value, along)
        node.replace_input_with(place, walk.repeat(node, value, along, rank))
        walk.changes[node.op_type] += 1


def _first_of_equal(walk: BatchFollower, node: ir.Node, value: ir.Value, axis: int) -> ir.Value:
    """The state of one sample, where those of all are the same numbers that do not train: zeros."""
    tensor = value.const_value
    if tensor is None or np.asarray(tensor.numpy()).any():
        raise NotRebatched(f"{label(node)} reads {value.name!r}, which holds a different state for each sample")
    array = np.asarray(tensor.numpy())
    return walk.constant(np.take(array, [0], axis), f"{value.name}_of_one")


def resize(walk: BatchFollower, node: ir.Node) -> None:
    """Sizes to resize to: the batch as many as there are."""
    axis = walk.batch_axis(node.inputs[0])
    given = walk.numbers(node, 3)
    if axis is None or given is None or "axes" in node.attributes or int(given[axis]) != walk.size:
        return
    parts = [walk.constant(np.asarray([int(one)], np.int64), "size") for one in given]
    parts[axis] = walk.batch_size(node)
    (shape,) = walk.insert(node, "Concat", parts, {"axis": 0})
    node.replace_input_with(3, shape)
    walk.changes["Resize"] += 1


def _holds_batch(sizes: np.ndarray) -> bool:
    """Whether the graph computed one of these sizes from the batch."""
    return bool(((sizes > 0) & (sizes % BATCH == 0)).any())


def _resolve(target: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """A target shape of `Reshape` in numbers, its 0 and -1 replaced; None where it does not fit."""
    resolved = [sizes[place] if one == 0 and place < len(sizes) else one for place, one in enumerate(target)]
    if -1 in resolved:
        others = prod(one for one in resolved if one != -1)
        if others == 0 or prod(sizes) % others:
            return None
        resolved[resolved.index(-1)] = prod(sizes) // others
    return resolved


REWRITES: Mapping[str, Callable[[BatchFollower, ir.Node], None]] = {
    "Reshape": reshape,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Expand": expand,
    "Slice": slices,
    "Concat": concat,
    "LSTM": recurrent,
    "GRU": recurrent,
    "RNN": recurrent,
    "Resize": resize,
}
"""Operator -> what rewrites a node of it."""

"""Shape arithmetic that moves numbers: Gather, Concat, Slice and their kin on Python values.

A number is a rank-0 tensor, a tuple a rank-1 tensor, a tuple of tuples a rank-2 tensor. The numbers may be symbolic,
so nothing here compares them unless the operator itself must.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from onward.lowering.kernels.host import HostValue, flatten, freeze, host_shape, unflatten
from onward.lowering.kernels.operands import REQUIRED, by_attributes
from onward.lowering.ops.movement import normalize_axes, normalize_axis, resolve_shape
from onward.lowering.registry import lowers_on_host


def _ints(value: HostValue) -> list[int]:
    return [int(number) for number in flatten(value)]


@lowers_on_host("Identity")
def identity(input: HostValue) -> HostValue:
    """The same value."""
    return input


@lowers_on_host("Shape", result_dtype="int64")
def shape(data: HostValue, *, start: int = 0, end: int | None = None) -> HostValue:
    """The shape of a host value, or a part of it."""
    return host_shape(data)[start:end]


@lowers_on_host("Size", result_dtype="int64")
def size(data: HostValue) -> HostValue:
    """The number of elements."""
    return math.prod(host_shape(data))


@lowers_on_host("Gather")
def gather(data: HostValue, indices: HostValue, *, axis: int = 0) -> HostValue:
    """Picks positions along an axis; the axes of `indices` take that axis' place."""
    axis = normalize_axis(axis, len(host_shape(data)))

    def pick(part: Any, positions: HostValue) -> HostValue:
        if isinstance(positions, tuple):
            return tuple(pick(part, position) for position in positions)
        return part[int(positions)]  # type: ignore[no-any-return]

    return _map_at(data, axis, lambda part: pick(part, indices))


def _map_at(value: HostValue, depth: int, function: Callable[[Any], HostValue]) -> HostValue:
    """Applies a function to every sub-tensor that starts at an axis."""
    if depth == 0:
        return function(value)
    assert isinstance(value, tuple)
    return tuple(_map_at(item, depth - 1, function) for item in value)


@lowers_on_host("Concat")
def concat(*inputs: HostValue, axis: int = 1) -> HostValue:
    """Joins values along an axis; up to version 3 it may be left out."""
    rank = len(host_shape(inputs[0]))
    if rank == 0:
        raise ValueError("rank-0 values cannot be concatenated.")
    return _join(inputs, normalize_axis(axis, rank))


def _join(values: Sequence[HostValue], axis: int) -> HostValue:
    if axis == 0:
        return tuple(itertools.chain.from_iterable(value for value in values if isinstance(value, tuple)))
    return tuple(_join(parts, axis - 1) for parts in zip(*values, strict=True))


@lowers_on_host("Slice", since=10)
def slice_(
    data: HostValue,
    starts: HostValue,
    ends: HostValue,
    axes: HostValue | None = None,
    steps: HostValue | None = None,
) -> HostValue:
    """Cuts along axes with Python's meaning of start, end and step."""
    first, last = _ints(starts), _ints(ends)
    rank = len(host_shape(data))
    along = normalize_axes(range(len(first)) if axes is None else _ints(axes), rank)
    strides = [1] * len(first) if steps is None else _ints(steps)
    for start, end, axis, step in zip(first, last, along, strides, strict=True):
        data = _map_at(data, axis, operator.itemgetter(slice(start, end, step)))
    return data


lowers_on_host("Slice", since=1)(by_attributes(slice_, starts=REQUIRED, ends=REQUIRED, axes=None))


@lowers_on_host("Squeeze", since=13)
def squeeze(data: HostValue, axes: HostValue | None = None) -> HostValue:
    """Drops axes of size 1."""
    sizes = host_shape(data)
    if axes is None:
        drop = tuple(axis for axis, size in enumerate(sizes) if size == 1)
    else:
        drop = normalize_axes(_ints(axes), len(sizes))
    for axis in sorted(drop, reverse=True):
        if sizes[axis] != 1:
            raise ValueError(f"axis {axis} has size {sizes[axis]}; only axes of size 1 can be squeezed.")
        data = _map_at(data, axis, operator.itemgetter(0))
    return data


lowers_on_host("Squeeze", since=1)(by_attributes(squeeze, axes=None))


@lowers_on_host("Unsqueeze", since=13)
def unsqueeze(data: HostValue, axes: HostValue) -> HostValue:
    """Inserts axes of size 1, counted in the result."""
    along = _ints(axes)
    for axis in sorted(normalize_axes(along, len(host_shape(data)) + len(along))):
        data = _map_at(data, axis, lambda part: (part,))
    return data


lowers_on_host("Unsqueeze", since=1)(by_attributes(unsqueeze, axes=REQUIRED))


@lowers_on_host("Reshape", since=5)
def reshape(data: HostValue, shape: HostValue, *, allowzero: int = 0) -> HostValue:
    """The same numbers in another shape."""
    numbers = flatten(data)
    target = resolve_shape(host_shape(data), _ints(shape), bool(allowzero))
    if -1 in target:
        target[target.index(-1)] = len(numbers) // max(-math.prod(target), 1)
    if math.prod(target) != len(numbers):
        raise ValueError(f"{len(numbers)} elements do not fit the shape {target}.")
    return unflatten(numbers, tuple(target))


lowers_on_host("Reshape", since=1)(by_attributes(reshape, shape=()))


@lowers_on_host("Flatten")
def flatten_(input: HostValue, *, axis: int = 1) -> HostValue:
    """Two axes remain: those before `axis`, and the rest."""
    sizes = host_shape(input)
    at = axis + len(sizes) if axis < 0 else axis
    return unflatten(flatten(input), (math.prod(sizes[:at]), math.prod(sizes[at:])))


@lowers_on_host("Transpose")
def transpose(data: HostValue, *, perm: tuple[int, ...] | None = None) -> HostValue:
    """The axes in another order."""
    sizes = host_shape(data)
    order = tuple(reversed(range(len(sizes)))) if perm is None else perm
    numbers = flatten(data)
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    target = tuple(sizes[axis] for axis in order)
    places = itertools.product(*(range(size) for size in target))
    moved = [numbers[sum(i * strides[axis] for i, axis in zip(place, order, strict=True))] for place in places]
    return unflatten(moved, target)


@lowers_on_host("Split", since=13)
def split(
    input: HostValue,
    split: HostValue | None = None,
    *,
    axis: int = 0,
    num_outputs: int | None = None,
    output_count: int,
) -> tuple[HostValue, ...]:
    """Parts along an axis; with `num_outputs` the last may be smaller."""
    sizes = host_shape(input)
    axis = normalize_axis(axis, len(sizes))
    count = num_outputs or output_count
    part = -(-sizes[axis] // count)
    lengths = _ints(split) if split is not None else [min(part, sizes[axis] - i * part) for i in range(count)]
    ends = list(itertools.accumulate(lengths))
    parts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return tuple(_map_at(input, axis, operator.itemgetter(part)) for part in parts)


@lowers_on_host("Split", since=2)
def split_2(
    input: HostValue, *, split_: tuple[int, ...] | None = None, axis: int = 0, output_count: int
) -> tuple[HostValue, ...]:
    """Parts along an axis; up to version 12 their sizes are an attribute."""
    return split(input, split_, axis=axis, output_count=output_count)


def _size_of_expand(input: HostValue, shape: HostValue) -> int:
    target = _ints(shape)
    sizes = [1] * (len(target) - len(host_shape(input))) + list(host_shape(input))
    target = [1] * (len(sizes) - len(target)) + target
    return math.prod(max(pair) for pair in zip(sizes, target, strict=True))


@lowers_on_host("Expand", since=8, growth=_size_of_expand)
def expand(input: HostValue, shape: HostValue) -> HostValue:
    """Repeats along axes of size 1 until the shape is reached."""
    target, value = _ints(shape), input
    for _ in range(len(target) - len(host_shape(value))):
        value = (value,)
    sizes = host_shape(value)
    target = [1] * (len(sizes) - len(target)) + target
    for axis, (size, wanted) in enumerate(zip(sizes, target, strict=True)):
        if size != wanted and wanted != 1:
            if size != 1:
                raise ValueError(f"shape {sizes} does not broadcast to {target}.")
            value = _map_at(value, axis, lambda part, count=wanted: part * count)  # type: ignore[misc]
    return value


@lowers_on_host("Tile", since=6, growth=lambda input, repeats: math.prod((*host_shape(input), *_ints(repeats))))
def tile(input: HostValue, repeats: HostValue) -> HostValue:
    """Repeats the value along each axis."""
    for axis, count in enumerate(_ints(repeats)):
        input = _map_at(input, axis, lambda part, count=count: part * count)  # type: ignore[misc]
    return input


def _size_of_fill(input: HostValue, value: HostValue | None = None) -> int:
    # Without a value the fill is of floats, which are data.
    return sys.maxsize if value is None else math.prod(_ints(input))


@lowers_on_host("ConstantOfShape", since=9, result_dtype="value", growth=_size_of_fill)
def constant_of_shape(input: HostValue, *, value: HostValue | None = None) -> HostValue:
    """One number repeated to a shape."""
    sizes = tuple(_ints(input))
    assert value is not None
    return unflatten([flatten(value)[0]] * math.prod(sizes), sizes)


def _size_of_range(start: HostValue, limit: HostValue, delta: HostValue, stash_type: int = 1) -> int:
    first, last, step = (flatten(value)[0] for value in (start, limit, delta))
    if isinstance(first, float) or step == 0:
        return sys.maxsize
    return len(range(int(first), int(last), int(step)))


@lowers_on_host("Range", since=11, growth=_size_of_range)
def range_(start: HostValue, limit: HostValue, delta: HostValue, *, stash_type: int = 1) -> HostValue:
    """Whole numbers from `start` on, below `limit`."""
    first, last, step = (int(flatten(value)[0]) for value in (start, limit, delta))
    return tuple(range(first, last, step))


@lowers_on_host("ScatterElements", since=11)
@lowers_on_host("Scatter", since=9)
def scatter_elements(
    data: HostValue, indices: HostValue, updates: HostValue, *, axis: int = 0, reduction: str = "none"
) -> HostValue:
    """A rank-1 value with some positions replaced."""
    places = [(int(position),) for position in flatten(indices)]
    return _scatter(data, places, flatten(updates), reduction)


@lowers_on_host("ScatterND", since=11)
def scatter_nd(data: HostValue, indices: HostValue, updates: HostValue, *, reduction: str = "none") -> HostValue:
    """A value with the elements at some coordinates replaced."""
    depth = host_shape(indices)[-1]
    positions = _ints(indices)
    places = [tuple(positions[i : i + depth]) for i in range(0, len(positions), depth)]
    return _scatter(data, places, flatten(updates), reduction)


_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": max,
    "min": min,
}


def _scatter(data: HostValue, places: Sequence[tuple[int, ...]], updates: Sequence[Any], reduction: str) -> HostValue:
    sizes = host_shape(data)
    if places and len(places[0]) != len(sizes):
        raise ValueError(
            f"shape arithmetic scatters single elements; got positions {places[0]} in a value of shape {sizes}."
        )
    numbers = flatten(data)
    for place, update in zip(places, updates, strict=True):
        index = 0
        for position, length in zip(place, sizes, strict=True):
            index = index * length + normalize_axis(position, length)
        numbers[index] = _REDUCTIONS[reduction](numbers[index], update)
    return freeze(unflatten(numbers, sizes))

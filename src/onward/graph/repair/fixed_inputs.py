"""Inputs that hold one number for every batch, as a sampling rate or an initial state: computed in the training graph.

Caches of keys and values are empty there. The user's own graph keeps these inputs, and so does the exported model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.repair.caches import attend_to_no_past, cached_axis
from onward.graph.weights.gradients import TRAINABLE_TYPES
from onward.spelling import did_you_mean

FIXED_INPUT = "a fixed input (data.fixed_inputs)"


def fix_inputs(model: ir.Model, values: Mapping[str, float]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Replaces inputs by tensors of their type and shape that hold one number, in place.

    A dimension that is open has the size that it has at another input of the same name, or else that of the first
    axis of the first input that is left. A cache of keys and values that is filled with 0 has no tokens.

    Args:
        model: prepared for lowering.
        values: input, or pattern of inputs -> the number.

    Returns:
        the initializers that now stand for inputs, and a note for the user on every size that was assumed.

    Raises:
        ModelError: no such input, a number that its type cannot hold, or no input is left.
    """
    if not values:
        return (), ()
    inputs = {str(value.name): value for value in model.graph.inputs}
    values = _by_name(values, inputs)
    for name, number in values.items():
        _check(name, number, inputs)
    rest = [value for name, value in inputs.items() if name not in values]
    if not rest:
        raise ModelError(
            f"data.fixed_inputs names every input of the model ({', '.join(inputs)}); remove at least one."
        )
    writer = NodeWriter(model, "onward_fixed_")
    notes: list[str] = []
    for name, number in values.items():
        empty_axis = None if number else cached_axis(inputs[name])
        if empty_axis is not None:
            attend_to_no_past(inputs[name])
        if empty_axis is None or inputs[name].uses():
            fixed = _filled(writer, inputs[name], number, rest, notes, empty_axis)
            inputs[name].replace_all_uses_with(fixed, replace_graph_outputs=True)
        model.graph.inputs.remove(inputs[name])
    model.graph.sort()
    return tuple(writer.constants), tuple(notes)


def _by_name(values: Mapping[str, float], inputs: Collection[str]) -> dict[str, float]:
    """The numbers of inputs that names and patterns give; exact names win."""
    found: dict[str, float] = {}
    for pattern, number in values.items():
        found |= dict.fromkeys([name for name in inputs if fnmatchcase(name, pattern)] or [pattern], number)
    return found | {name: values[name] for name in inputs if name in values}


def _check(name: str, number: float, inputs: Mapping[str, ir.Value]) -> None:
    if name not in inputs:
        raise ModelError(
            f"data.fixed_inputs names {name!r}; the inputs of the model are {', '.join(map(repr, inputs))}."
            f"{did_you_mean(name, inputs)}"
        )
    value = inputs[name]
    if value.dtype is None or value.shape is None or value.dtype == ir.DataType.STRING:
        raise ModelError(
            f"data.fixed_inputs names {name!r}, which is {value.type}; only numeric tensors of known rank "
            "can be fixed. Remove the entry."
        )
    held = np.asarray(number).astype(value.dtype.numpy())
    if value.dtype.is_floating_point():
        fits = bool(np.isfinite(held.astype(np.float64)))
    else:
        fits = float(held.astype(np.float64)) == float(number)
    if not fits:
        raise ModelError(
            f"data.fixed_inputs gives {name!r} the value {number:g}, which its type {value.dtype.name.lower()} cannot "
            "hold."
        )


def _filled(
    writer: NodeWriter,
    value: ir.Value,
    number: float,
    rest: list[ir.Value],
    notes: list[str],
    empty_axis: int | None = None,
) -> ir.Value:
    assert value.dtype is not None
    assert value.shape is not None
    kind = value.dtype.numpy()
    shape = ir.Shape([0 if axis == empty_axis else size for axis, size in enumerate(value.shape)])
    sizes = [size if isinstance(size, int) else None for size in shape]
    stem = str(value.name)
    if all(size is not None for size in sizes):
        return writer.constant(np.full([size or 0 for size in sizes], number), stem, kind)
    parts = []
    for axis, size in enumerate(shape):
        if isinstance(size, int):
            parts.append(writer.constant([size], f"{stem}_size"))
            continue
        place = _find(size.value, rest)
        if place is None:
            place = rest[0], 0
            notes.append(
                f"input {stem!r} is fixed to {number:g}; its open axis {axis} has the size of axis 0 of input "
                f"{str(rest[0].name)!r}."
            )
        parts.append(writer.size_of(*place))
    sizes_now = writer.apply("Concat", *parts, axis=0, name=f"{stem}_shape")
    filled = writer.apply("Expand", writer.constant(number, f"{stem}_value", kind), sizes_now, name=stem)
    filled.type, filled.shape = value.type, shape
    return filled


def _find(symbol: str | None, rest: list[ir.Value]) -> tuple[ir.Value, int] | None:
    """The input and its axis that has this size, too."""
    for value in rest:
        for axis, size in enumerate(value.shape or ()):
            if symbol is not None and not isinstance(size, int) and size.value == symbol:
                return value, axis
    return None


_RATE = re.compile(r"(^|_)(sr|sample_?rate|sampling_?rate)$", re.IGNORECASE)
_STATE = re.compile(r"^(h|c)[0nx]?$|^(state|hidden|cell|past|cache)\w*$|_(state|cache)$", re.IGNORECASE)
_NO_STATE = re.compile(r"hidden_states?$", re.IGNORECASE)
_RATE_IN_HERTZ = 16000.0


def propose_fixed_inputs(model: ir.Model) -> dict[str, float]:
    """Inputs that no sample of a data set has, with the number that suits them: a sampling rate, states of zeros.

    A state is called one or comes back as an output of its shape, or its batch is not its first axis. Caches of
    keys and values are empty.
    """
    inputs = [value for value in model.graph.inputs if not value.is_initializer() and value.shape is not None]
    batch = next((value.shape[0] for value in inputs if value.shape and not isinstance(value.shape[0], int)), None)
    outputs = {_key(value) for value in model.graph.outputs}
    found: dict[str, float] = {}
    for index, value in enumerate(inputs):
        name, shape = str(value.name), value.shape or ir.Shape([])
        if _RATE.search(name) and all(size == 1 for size in shape):
            found[name] = _RATE_IN_HERTZ
        if value.dtype not in TRAINABLE_TYPES or len(shape) < 2 or _NO_STATE.search(name):
            continue
        is_state = bool(_STATE.search(name)) or (index > 0 and len(shape) > 2 and _key(value) in outputs)
        if batch is None:
            is_sample = not is_state
        else:
            batch_is_later = batch.value is not None and batch.value in _key(value)[1:]
            is_sample = not isinstance(shape[0], int) or not (is_state or batch_is_later)
        if not is_sample or cached_axis(value) is not None:
            found[name] = 0.0
    return found if len(found) < len(inputs) else {}


def _key(value: ir.Value) -> tuple[int | str | None, ...]:
    return tuple(size if isinstance(size, int) else size.value for size in value.shape or ())


def by_pattern(values: Mapping[str, float], inputs: Collection[str]) -> dict[str, float]:
    """The same numbers by patterns, where numbered inputs, and no others, have one: `past_key_values.*`."""
    found: dict[str, float] = {}
    for name, number in values.items():
        pattern = f"{re.split(r'[0-9]', name)[0]}*"
        alike = [one for one in inputs if fnmatchcase(one, pattern)]
        is_pattern = len(alike) > 1 and all(values.get(one) == number for one in alike)
        found[pattern if is_pattern else name] = number
    return found


def note_on_inputs(model: ir.Model) -> tuple[str, ...]:
    """What a run has to say of inputs that are no feature of a sample."""
    found = propose_fixed_inputs(model)
    if not found:
        return ()
    many, found = len(found) > 1, by_pattern(found, [str(value.name) for value in model.graph.inputs])
    listed = ", ".join(
        f'"{name}": {number:g}' if "*" in name else f"{name}: {number:g}" for name, number in found.items()
    )
    names = ", ".join(map(repr, found))
    return (
        f"input{'s' if many else ''} {names} look{'' if many else 's'} like "
        f"{'states or settings that are' if many else 'a state or setting that is'} the same for every sample. Set "
        f"data.fixed_inputs: {{{listed}}} to train without {'them' if many else 'it'} in the data.",
    )

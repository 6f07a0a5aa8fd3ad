"""Which initializers train: those that a gradient reaches and that are weights, not constants of the arithmetic."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.iteration import every_node
from onward.graph.reading.tensor_storage import close_file
from onward.graph.weights.evidence import Exporter, why_constant
from onward.graph.weights.gradients import TRAINABLE_TYPES, reached_by_gradient
from onward.graph.weights.names import WeightNames
from onward.graph.weights.quantized_weights import quantized_weights

ImmutableWeights = Mapping[str, Sequence[tuple[int, float]]]
"""Operator -> (input index, value): rank-0 constants that never train."""


def find_running_statistics(graph: ir.Graph) -> tuple[str, ...]:
    """Names of initializers that batch normalization nodes read as running mean and variance."""
    names: dict[str, None] = {}
    for node in every_node(graph):
        if node.op_type == "BatchNormalization" and node.domain == "":
            for value in node.inputs[3:5]:
                if value is not None and value.is_initializer():
                    names[str(value.name)] = None
    return tuple(names)


def choose_weights(
    model: ir.Model,
    roots: Sequence[str],
    states: Sequence[str] = (),
    weights_to_train: Sequence[str] = (),
    weights_not_to_train: Sequence[str] = (),
    immutable_weights: ImmutableWeights | None = None,
    constants: Mapping[str, str] | None = None,
    known_as: WeightNames | None = None,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Chooses what trains, and says of every other float initializer and every quantized weight why it does not.

    Without patterns, an initializer trains if a gradient from `roots` reaches it and nothing speaks for a constant:
    rank 0 (unless torch's exporter says it was a parameter), a buffer, a mask, a one-element tensor in elementwise
    arithmetic, a table folded at export or of signal processing, a quantization scale. An exact name in
    `weights_to_train` overrules that.

    Args:
        model: prepared for lowering.
        roots: names of the values that gradients start from.
        states: running statistics.
        weights_to_train: exact names or `*`-patterns, of initializers or module paths; empty: all that can train.
        weights_not_to_train: exact names or patterns taken out again.
        immutable_weights: rank-0 initializers of this value at this input of this operator never train.
        constants: initializers known not to be weights, with the reason; never trained, and matched by no pattern.
        known_as: module paths of the initializers, which patterns may name, too.

    Raises:
        ModelError: a pattern matches no float initializer; a weight asked for by name gets no gradient.
    """
    constants, known_as = constants or {}, known_as or WeightNames()
    reached = reached_by_gradient(model.graph, roots)
    initializers = {
        name: value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.dtype in TRAINABLE_TYPES
    }
    names = [name for name in initializers if name not in constants]
    integers = quantized_weights(model.graph)
    _require_floats(weights_to_train, integers, known_as)
    _require_matches("weights_to_train", weights_to_train, names, known_as)
    _require_matches("weights_not_to_train", weights_not_to_train, names, known_as)
    exporter = Exporter.of(model)
    chosen: list[str] = []
    frozen: dict[str, str] = {}
    for name, value in initializers.items():
        reason = constants.get(name) or _why_frozen(
            name, value, reached, states, weights_to_train, weights_not_to_train, known_as
        )
        if not reason and immutable_weights:
            reason = _why_immutable(value, immutable_weights)
        if not reason and not known_as.is_named(name, weights_to_train):
            reason = why_constant(value, exporter)
            close_file(value.const_value)
        if reason:
            frozen[name] = reason
        else:
            chosen.append(name)
    return tuple(chosen), frozen | integers


def _require_floats(asked: Sequence[str], integers: Mapping[str, str], known_as: WeightNames) -> None:
    for name, reason in integers.items():
        if known_as.is_named(name, asked):
            raise ModelError(
                f"training.weights_to_train names {known_as.shown(name)!r}, {reason}, which get no gradient. Train the "
                "model before quantization and quantize it afterwards (onward export --quantize)."
            )


def _why_frozen(
    name: str,
    value: ir.Value,
    reached: set[str],
    states: Sequence[str],
    weights_to_train: Sequence[str],
    weights_not_to_train: Sequence[str],
    known_as: WeightNames,
) -> str:
    if name in states:
        return "running statistic of batch normalization"
    if name not in reached:
        if known_as.is_named(name, weights_to_train):
            raise ModelError(
                f"training.weights_to_train names {known_as.shown(name)!r}, but no gradient of the loss reaches it."
            )
        return "no gradient reaches it" if value.uses() or value.is_graph_output() else "no node reads it"
    if known_as.matches(name, weights_not_to_train):
        return "listed in weights_not_to_train"
    if weights_to_train and not known_as.matches(name, weights_to_train):
        return "not listed in weights_to_train"
    return ""


def _require_matches(field: str, patterns: Sequence[str], names: Sequence[str], known_as: WeightNames) -> None:
    for pattern in patterns:
        if not any(known_as.matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, known_as.everything(names), n=3, cutoff=0.4)
            hint = f"; did you mean {', '.join(repr(n) for n in near)}?" if near else "."
            such = "" if near or not names else f" They are {known_as.listed(names, 3)}; `onward inspect` lists them."
            raise ModelError(
                f"training.{field}: {pattern!r} matches none of the model's {len(names)} float initializers{hint}{such}"
            )


def _why_immutable(value: ir.Value, immutable_weights: ImmutableWeights) -> str:
    """The original's rule: a rank-0 constant of a listed value at a listed place."""
    tensor = value.const_value
    assert tensor is not None
    if len(tensor.shape) > 0:
        return ""
    number = np.float32(tensor.numpy())
    for use in value.uses():
        for index, listed in immutable_weights.get(use.node.op_type, ()):
            if use.idx == index and number == np.float32(listed):
                return f"listed in immutable_weights: {use.node.op_type}, input {index}, {listed:g}"
    return ""

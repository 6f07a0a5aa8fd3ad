"""The weight update as an ONNX graph: weights, gradients, moments and learning rate in, weights and moments out.

Written in operators of the standard's main domain, opset 18, with the clipping and the skipping of gradients that are
not finite that training has.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.artifacts.small_weights import join_tensors, separate_tensors, update_groups
from onward.artifacts.update_formulas import UpdateWriter, shapes_of_slots
from onward.errors import ModelError, ParametersError
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.writing.model_saving import save_model
from onward.lowering.module import OnnxModule
from onward.optim.building import attributes_of_weight
from onward.optimizers.registry import OPTIMIZERS, optimizer_named
from onward.parameters import Optimizer

OPSET = 18
"""Of all training graphs."""

IR_VERSION = 10
LEARNING_RATE = "learning_rate"
UPDATE_COUNT = "update_count"
GRADIENT_NORM = "gradient_norm"
RATE_SUMS = ("largest_rate", "rate_squares")
"""What Schedule-Free knows of the learning rates so far."""
_LARGEST_NORM_ERROR = 1e-6
"""What torch's clipping adds to the norm."""


def gradient_name(weight: str) -> str:
    """The name of a weight's gradient."""
    return f"{weight}_grad"


def new_name(name: str) -> str:
    """The name under which the new value of a weight, moment, running statistic or count comes out."""
    return f"{name}_new"


def slot_shapes(optimizer: Optimizer, weight: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The names of a weight's moments, each the weight's, `_`, and the slot's name in a checkpoint, with their shapes.

    Raises:
        ParametersError: the optimizer's update is not written as a graph.
    """
    name = optimizer.training_optimizer_name
    reason = optimizer_named(name).why_no_graph
    if reason:
        raise ParametersError(
            f"optimizer.training_optimizer_name is {name}, whose update cannot be written as an ONNX graph: {reason}. "
            "Write the training graph without it (--training-graph), or set one of "
            f"{', '.join(kind.name for kind in OPTIMIZERS if not kind.why_no_graph)}."
        )
    found = shapes_of_slots(name, attributes_of_weight(optimizer, weight), tuple(shape))
    return {f"{weight}_{slot}": size for slot, size in found.items()}


def refuse_average(name: str) -> None:
    """Refuses, for graphs that keep the weights themselves, an optimizer whose result is an average of them.

    Raises:
        ParametersError: it is one.
    """
    if optimizer_named(name).averages_weights:
        raise ParametersError(
            f"optimizer.training_optimizer_name is {name}, and this form of training graph has no place for its "
            "average: it would give out the weights that gradients are taken at. Write the step with --train-step, "
            "which gives both, or set another optimizer."
        )


def write_optimizer_graph(net: OnnxModule, optimizer: Optimizer, path: str | os.PathLike[str]) -> None:
    """Writes one weight update as an ONNX model.

    Inputs: `learning_rate` (float32) and `update_count` (int64, updates done so far), both of rank 0; for every
    trained weight `<weight>`, `<weight>_grad` and its moments (`<weight>_exp_avg` and others, see `slot_shapes`),
    zeros at the beginning. Outputs: the new weights and moments as `<name>_new`,
    `update_count_new`, and `gradient_norm`, of all gradients before clipping.

    Raises:
        ParametersError: attributes that contradict each other.
        ModelError: a weight's name clashes with one of these names.
        StorageError: the file cannot be written.
    """
    model = empty_model("optimizer")
    values = dict(net.weights.items())
    weights = {name: add_input(model, name, ir_type(w.dtype), w.shape) for name, w in values.items()}
    gradients = {name: add_input(model, gradient_name(name), ir_type(w.dtype), w.shape) for name, w in values.items()}
    append_update(model, optimizer, weights, gradients)
    save_model(model, Path(path))


def empty_model(name: str) -> ir.Model:
    """A model without nodes, of the opset of all training graphs."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=name)
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="onward")


def ir_type(dtype: Any) -> ir.DataType:
    """The ONNX type of a torch type."""
    return ir.tensor_adapters.from_torch_dtype(dtype)


def append_update(
    model: ir.Model,
    optimizer: Optimizer,
    weights: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    training_operators: bool = False,
) -> None:
    """Appends a weight update to a model, with the inputs it needs in addition to weights and gradients, and its
    outputs.

    With `training_operators`, Adam and Momentum of ai.onnx.preview.training stand where they mean the same.
    """
    rate = add_input(model, LEARNING_RATE, ir.DataType.FLOAT, ())
    count = add_input(model, UPDATE_COUNT, ir.DataType.INT64, ())
    writer = NodeWriter(model, "update/")
    done = append_formulas(writer, optimizer, weights, gradients, rate, count, training_operators=training_operators)
    counted = writer.apply("Where", done.finite, done.updates_now, count)
    add_output(model, counted, new_name(UPDATE_COUNT), ir.DataType.INT64, ())
    add_output(model, done.norm, GRADIENT_NORM, ir.DataType.FLOAT, ())


@dataclass(frozen=True, kw_only=True)
class AppendedUpdate:
    """An update in a graph.

    Attributes:
        norm: of all gradients before clipping.
        finite: whether it is done; else everything keeps its value.
        updates_now: updates done, this one included.
    """

    norm: ir.Value
    finite: ir.Value
    updates_now: ir.Value


def append_formulas(
    writer: NodeWriter,
    optimizer: Optimizer,
    weights: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    rate: ir.Value,
    count: ir.Value,
    *,
    training_operators: bool = False,
    finite_too: Sequence[ir.Value] = (),
    statistics: Mapping[str, tuple[ir.Value, ir.Value]] = MappingProxyType({}),
    initial_lr: float | None = None,
) -> AppendedUpdate:
    """Appends the update of all weights to a model, with inputs and outputs for their moments and outputs for them.

    Args:
        writer: of the model.
        optimizer: which update.
        weights, gradients: by the weight's name.
        rate: the learning rate, float32 of rank 0.
        count: updates done so far, int64 of rank 0.
        training_operators: as of `append_update`.
        finite_too: float values, of which one that is not finite means that the update is skipped.
        statistics: old and new values that become outputs, too; a skipped update keeps the old ones.
        initial_lr: with which state begins that depends on a rate (of torch's Rprop and ASGD); None: with the rate of
            the first update.
    """
    model = writer.model
    slots = {
        name: [add_input(model, slot, value.dtype, shape) for slot, shape in _slots(optimizer, name, value).items()]
        for name, value in weights.items()
    }
    update = UpdateWriter(
        writer=writer,
        name=optimizer.training_optimizer_name,
        rate=rate,
        first_rate=rate if initial_lr is None else writer.constant(initial_lr, "initial_lr", np.float32),
        updates_before=count,
        shared={},
        training_operators=training_operators,
    )
    updates_now = writer.apply("Add", count, writer.constant(1, "one"))
    averages = optimizer_named(update.name).averages_weights
    olds_of_rates = [add_input(model, name, ir.DataType.FLOAT, ()) for name in RATE_SUMS] if averages else []
    news_of_rates = update.count_rates(*olds_of_rates) if averages else []
    norm, finite = _norm(writer, list(gradients.values()))
    if checked := [*finite_too, *(new for _, new in statistics.values())]:
        finite = writer.apply("And", finite, _are_finite(writer, checked))
    share = _clipping_share(writer, norm, optimizer.max_norm_clip)
    results = list(zip(RATE_SUMS, olds_of_rates, news_of_rates, strict=False))
    written_before = len(model.graph)
    for names in update_groups(optimizer, weights, gradients):
        attributes = attributes_of_weight(optimizer, names[0])
        _check(attributes, optimizer.training_optimizer_name)
        gradient = update.widen(join_tensors(writer, [gradients[name] for name in names]))
        if share is not None:
            gradient = writer.apply("Mul", gradient, update.like(share, gradient))
        olds = [[weights[name], *slots[name]] for name in names]
        results += _updated(update, attributes, updates_now, gradient, olds)
    results += [(name, old, new) for name, (old, new) in statistics.items()]
    made = _unless_skipped(writer, finite, written_before, gradients.values(), results)
    for label, old, _ in results:
        add_output(model, made[label], new_name(label), old.dtype, old.shape)
    for name, weight in weights.items() if averages else ():
        found = [update.widen(made[label]) for label in (name, next(iter(_slots(optimizer, name, weight))))]
        average = update.like(update.average(attributes_of_weight(optimizer, name), *found), weight)
        add_output(model, average, f"{name}_average", weight.dtype, weight.shape)
    return AppendedUpdate(norm=norm, finite=finite, updates_now=updates_now)


def _updated(
    update: UpdateWriter,
    attributes: Mapping[str, Any],
    updates_now: ir.Value,
    gradient: ir.Value,
    olds: Sequence[Sequence[ir.Value]],
) -> list[tuple[str, ir.Value, ir.Value]]:
    """Name, old and new value of weights that are updated together, and of their moments.

    Args:
        update: that writes it.
        attributes: of each of the weights.
        updates_now: as of `AppendedUpdate`.
        gradient: of all, joined.
        olds: of each weight: itself and its moments.
    """
    columns = list(zip(*olds, strict=True))
    joined = [join_tensors(update.writer, column) for column in columns]
    news = update.apply(attributes, updates_now, gradient, [update.widen(old) for old in joined])
    found = []
    for column, old, new in zip(columns, joined, news, strict=True):
        parts = separate_tensors(update.writer, update.like(new, old), column)
        found += [(str(one.name), one, part) for one, part in zip(column, parts, strict=True)]
    return found


def _unless_skipped(
    writer: NodeWriter,
    finite: ir.Value,
    start: int,
    gradients: Collection[ir.Value],
    results: Sequence[tuple[str, ir.Value, ir.Value]],
) -> dict[str, ir.Value]:
    """Moves the updates from the main graph into an `If`, whose outputs are new values, or the old ones.

    A choice element by element (`Where`) took a fifth of a step of ONNX Runtime.

    Args:
        writer: of the model.
        finite: the condition.
        start: how many nodes come before the updates.
        gradients: what the updates read beside old values.
        results: label, old value and new value of each output.
    """
    graph = writer.graph
    moved, changing = list[ir.Node](), {*gradients, *(old for _, old, _ in results)}
    for node in list(graph)[start:]:
        if not changing.isdisjoint(node.inputs):  # rates and corrections stay: they are the same for all weights
            moved.append(node)
            changing.update(node.outputs)
    graph.remove(moved)
    updated, own = list[ir.Value](), set(moved)
    for _, _, new in results:
        if new.producer() not in own or any(new is other for other in updated):
            moved.append(writer.new_node("Identity", [new], f"{writer.prefix}updated"))
            new = moved[-1].outputs[0]
        updated.append(new)
    kept = [writer.new_node("Identity", [old], f"{writer.prefix}kept") for _, old, _ in results]
    branches = {"then_branch": (updated, moved), "else_branch": ([node.outputs[0] for node in kept], kept)}
    attributes = [
        ir.AttrGraph(name, ir.Graph([], values, nodes=nodes, name=name)) for name, (values, nodes) in branches.items()
    ]
    names = [writer.unique(f"{writer.prefix}{label}") for label, _, _ in results]
    outputs = [ir.Value(name=name) for name in names]
    node_name = writer.unique_node_name(f"{writer.prefix}unless_skipped")
    graph.append(ir.Node("", "If", [finite], attributes, outputs=outputs, name=node_name))
    return {label: output for (label, _, _), output in zip(results, outputs, strict=True)}


def _slots(optimizer: Optimizer, name: str, weight: ir.Value) -> dict[str, tuple[int, ...]]:
    assert weight.shape is not None
    return slot_shapes(optimizer, name, weight.shape.numpy())


def _check(attributes: Mapping[str, Any], name: str) -> None:
    if name == "SGDOptimizer" and attributes["nesterov"] and not attributes["momentum"]:
        raise ParametersError("optimizer_attributes: nesterov is true while momentum is 0; set a momentum.")
    if optimizer_named(name).averages_weights and not attributes["alpha"]:
        raise ParametersError(f"optimizer_attributes: alpha is 0, with which {name} cannot average; set it above 0.")


def _norm(writer: NodeWriter, gradients: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """The L2 norm of all gradients, float32, and whether it is finite."""
    float32 = ir.DataType.FLOAT
    wide = [gradient if gradient.dtype is float32 else writer.cast(gradient, float32) for gradient in gradients]
    squares = [writer.apply("ReduceSumSquare", gradient, keepdims=0) for gradient in wide]
    norm = writer.apply("Sqrt", writer.apply("Sum", *squares), name="norm")
    norm.type = ir.TensorType(ir.DataType.FLOAT)
    rest = writer.apply("Sub", norm, norm)
    return norm, writer.apply("Equal", rest, writer.constant(0.0, "zero", np.float32), name="finite")


def _are_finite(writer: NodeWriter, values: Sequence[ir.Value]) -> ir.Value:
    """Whether all elements of some values are; of hundreds of running statistics by one operator each."""
    float32, flat = ir.DataType.FLOAT, list[ir.Value]()
    for value in values:
        wide = value if value.dtype is float32 else writer.cast(value, float32)
        is_vector = value.shape is not None and len(value.shape) == 1
        flat.append(wide if is_vector else writer.apply("Reshape", wide, writer.constant([-1], "flat")))
    joined = writer.apply("Concat", *flat, axis=0)
    rest = writer.apply("ReduceSum", writer.apply("Sub", joined, joined), keepdims=0)
    return writer.apply("Equal", rest, writer.constant(0.0, "no_rest", np.float32))


def _clipping_share(writer: NodeWriter, norm: ir.Value, largest: float | None) -> ir.Value | None:
    """What gradients are multiplied with so that their norm is at most `largest`, as torch's clipping computes it."""
    if largest is None:
        return None
    above = writer.apply("Add", norm, writer.constant(_LARGEST_NORM_ERROR, "norm_epsilon", np.float32))
    share = writer.apply("Div", writer.constant(largest, "largest_norm", np.float32), above)
    return writer.apply("Min", share, writer.constant(1.0, "no_clipping", np.float32))


def add_input(model: ir.Model, name: str, dtype: ir.DataType | None, shape: Any) -> ir.Value:
    """Adds an input.

    Raises:
        ModelError: an input or output has that name.
    """
    assert dtype is not None
    _check_free(model, name)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    model.graph.inputs.append(value)
    return value


def add_output(model: ir.Model, value: ir.Value, name: str, dtype: ir.DataType | None, shape: Any) -> None:
    """Makes a value an output, under a name that no input or output has.

    Raises:
        ModelError: one has it.
    """
    assert dtype is not None
    _check_free(model, name)
    value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
    model.graph.outputs.append(value)


def _check_free(model: ir.Model, name: str) -> None:
    if any(value.name == name for value in (*model.graph.inputs, *model.graph.outputs)):
        raise ModelError(
            f"the training graph needs the name {name!r} twice: a weight or feature of the model has a name that "
            "is reserved for a gradient, a moment or a result. Rename it in the model."
        )

"""Writes the standard's own training into a model: a `TrainingInfoProto` of loss, gradients and weight update.

What the algorithm shares with the inference graph it takes from there by name; what means something else in training
(dropout, batch normalization, and all that reads them) it computes itself.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes

from onward.artifacts.inference_model import inference_model
from onward.artifacts.optimizer_graph import (
    UPDATE_COUNT,
    append_update,
    gradient_name,
    new_name,
    refuse_average,
    slot_shapes,
)
from onward.artifacts.update_formulas import operator_for
from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter, TakenNames, free_name, node_names, value_names
from onward.graph.reading.differentiated import TRAINING_DOMAIN
from onward.graph.reading.model_file import TRAINING_INFO
from onward.graph.repair.split_weights import rearranging_nodes
from onward.graph.training_graph import TrainingGraph
from onward.graph.writing.model_saving import save_model
from onward.optim.building import attributes_of_weight
from onward.parameters import Optimizer

OLDEST_OPSET = 12
"""The opset that came with IR version 7, the first to know `TrainingInfoProto`; Dropout has a training mode since."""

OLDEST_IR_VERSION = 7
PREFIX = "training/"
"""What the names of the algorithm's own values begin with where the model has a value of the same name."""

_BATCH_NORM_TRAINS_SINCE = 14
_LARGEST_MOMENTS_BYTES = 1_500_000_000
_DIFFERENTIABLE = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16)


def write_training_info(
    graph: TrainingGraph,
    read: Callable[[str], torch.Tensor],
    optimizer: Optimizer,
    path: str | os.PathLike[str],
) -> tuple[str, ...]:
    """Writes the inference model with a `TrainingInfoProto` (ONNX IR version 7 and newer) for its training.

    The algorithm takes the features, the labels and `learning_rate` (float32, rank 0) and gives the loss, the new
    values of everything that changes, and `gradient_norm`; the initialization sets moments and `update_count` to 0.
    A `training_info` that the model had is replaced.

    Args:
        graph: with a loss, its model not yet expanded for lowering.
        read: gives a weight or running statistic by its name.
        optimizer: which update; Momentum and Adam of the standard where they mean the same, else arithmetic.
        path: of the file; weights above 1.5 GB in all go to `<path>.data` next to it.

    Returns:
        What to report to the user, one sentence each.

    Raises:
        ModelError: the opset is too old, a weight is in a nested graph or of a type that `Gradient` does not take,
            the moments are too large for one file, or a name stands for two things.
        ParametersError: attributes that contradict each other.
        StorageError: the file cannot be written.
    """
    model = graph.model.clone()
    _check_can_be_written(graph, model)
    refuse_average(optimizer.training_optimizer_name)
    exported = inference_model(graph, read, only_initializers=True)
    states = _switch_to_training(model, graph.states)
    _append_algorithm(model, graph, optimizer, states)
    moments = _moments(model, graph, optimizer)
    info = _split_off(model, exported, moments)
    ties = [copy for copy, tie in graph.ties.items() if tie.weight in graph.weights]
    _bind(info.update_binding, {name: new_name(name) for name in (*graph.weights, *ties, *states, *moments)})
    _add_initialization(info, moments)
    exported.meta[TRAINING_INFO] = (info,)
    exported.opset_imports[TRAINING_DOMAIN] = 1
    exported.ir_version = max(exported.ir_version or 0, OLDEST_IR_VERSION)
    save_model(exported, Path(path))
    return _notes(graph, optimizer)


def _check_can_be_written(graph: TrainingGraph, model: ir.Model) -> None:
    opset = model.opset_imports.get("", 0)
    if opset < OLDEST_OPSET:
        raise ModelError(
            f"a TrainingInfoProto needs opset {OLDEST_OPSET} or newer; the model is of opset {opset}. "
            "Convert it with onnx.version_converter, or export it again."
        )
    for name in graph.weights:
        dtype = model.graph.initializers[name].dtype
        if dtype not in _DIFFERENTIABLE:
            raise ModelError(
                f"the weight {name!r} is {'of no known type' if dtype is None else dtype.name}; the standard's "
                "Gradient takes FLOAT16, FLOAT and DOUBLE. Put it in weights_not_to_train, or convert the model."
            )
    rows = [copy for copy, tie in graph.ties.items() if copy == tie.weight and copy in graph.weights]
    if rows:
        raise ModelError(
            f"the weight {rows[0]!r} is one row that the model stores once for each sample; a TrainingInfoProto can "
            "only change what is stored. Put it in weights_not_to_train, or export with a dynamic batch axis."
        )


def _switch_to_training(model: ir.Model, states: tuple[str, ...]) -> dict[str, ir.Value]:
    """Turns dropout and batch statistics on; returns the new value of every running statistic."""
    owned = {model.graph.initializers[name] for name in states}
    current = {model.graph.initializers[name]: model.graph.initializers[name] for name in states}
    on: ir.Value | None = None
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.domain == "" and node.op_type == "Dropout":
            mode = node.inputs[2] if len(node.inputs) > 2 else None
            if mode is None or mode.is_initializer():
                on = on or NodeWriter(model, PREFIX).constant(True, "on", np.bool_)
                node.resize_inputs(3)
                node.replace_input_with(2, on)
        elif node.domain == "" and node.op_type == "BatchNormalization" and owned.issuperset(node.inputs[3:5]):
            _use_batch_statistics(model, node, current)
    return {str(old.name): new for old, new in current.items() if new is not old}


def _use_batch_statistics(model: ir.Model, node: ir.Node, current: dict[ir.Value, ir.Value]) -> None:
    opset = model.opset_imports[""]
    if opset < _BATCH_NORM_TRAINS_SINCE or node.graph is not model.graph:
        where = f"of opset {opset}" if opset < _BATCH_NORM_TRAINS_SINCE else "in a nested graph"
        raise ModelError(
            f"node {node.name!r} (BatchNormalization) is {where}; in a TrainingInfoProto it can update its running "
            f"statistics only from opset {_BATCH_NORM_TRAINS_SINCE} on and in the main graph. Convert the model, or "
            "write the step with --train-step."
        )
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    node.resize_outputs(3)
    for index, output in enumerate(node.outputs[1:], start=3):
        stored = node.inputs[index]
        assert stored is not None
        output.name, output.type, output.shape = f"{node.outputs[0].name}_{index}", stored.type, stored.shape
        node.replace_input_with(index, current[stored])  # layers that share a statistic update it one after the other
        current[stored] = output


def _append_algorithm(
    model: ir.Model, graph: TrainingGraph, optimizer: Optimizer, states: Mapping[str, ir.Value]
) -> None:
    """Leaves of the model what the loss needs; appends gradients, update and copies of tied weights."""
    loss = next(value for value in model.graph.outputs if value.name == graph.loss)
    model.graph.outputs.clear()
    model.graph.outputs.append(loss)
    for name, value in states.items():
        _give_out(model, ir.node("Identity", [value]), new_name(name), value)
    passes.RemoveUnusedNodesPass()(model)
    weights = {name: model.graph.initializers[name] for name in graph.weights}
    append_update(model, optimizer, weights, _append_gradient(model, weights, loss), training_operators=True)
    news = {str(value.name): value for value in model.graph.outputs}
    for copy, tie in graph.ties.items():
        if tie.weight in weights:
            *before, last = rearranging_nodes(model, tie.how, news[new_name(tie.weight)], f"{PREFIX}{copy}")
            model.graph.extend(before)
            _give_out(model, last, new_name(copy), weights[tie.weight])


def _append_gradient(model: ir.Model, weights: Mapping[str, ir.Value], loss: ir.Value) -> dict[str, ir.Value]:
    writer = NodeWriter(model, PREFIX)
    fixed = [value for value in model.graph.inputs if value.uses()]
    names = [str(value.name) for value in (*weights.values(), *fixed)]
    gradients = {
        name: ir.Value(name=writer.unique(gradient_name(name)), type=weight.type, shape=weight.shape)
        for name, weight in weights.items()
    }
    model.graph.append(
        ir.node(
            "Gradient",
            [*weights.values(), *fixed],
            {"xs": names[: len(weights)], "y": str(loss.name), **({"zs": names[len(weights) :]} if fixed else {})},
            domain=TRAINING_DOMAIN,
            outputs=list(gradients.values()),
            name=writer.unique_node_name("gradient"),
        )
    )
    return gradients


def _give_out(model: ir.Model, node: ir.Node, name: str, like: ir.Value) -> None:
    """Appends a node and makes its result an output under a name."""
    value = node.outputs[0]
    value.name, value.type = name, like.type
    if node.op_type == "Identity":
        value.shape = like.shape
    model.graph.append(node)
    model.graph.outputs.append(value)


def _moments(model: ir.Model, graph: TrainingGraph, optimizer: Optimizer) -> dict[str, ir.Value]:
    """What the optimizer keeps between two steps, all of it zeros at first."""
    stored = {name: graph.model.graph.initializers[name].shape for name in graph.weights}
    shapes = {name: shape.numpy() for name, shape in stored.items() if shape is not None}
    kept = {UPDATE_COUNT, *(slot for name, shape in shapes.items() for slot in slot_shapes(optimizer, name, shape))}
    moments = {str(value.name): value for value in model.graph.inputs if value.name in kept}
    needed = sum(_zeros(value).nbytes for value in moments.values())
    if needed > _LARGEST_MOMENTS_BYTES:
        raise ModelError(
            f"the moments of this optimizer take {needed:,} bytes, and a TrainingInfoProto must hold them in the "
            f"model's file, which ends at 2 GiB; {_LARGEST_MOMENTS_BYTES:,} bytes are the most that is written. Train "
            "fewer weights (weights_not_to_train), or write the step with --train-step."
        )
    return moments


def _zeros(value: ir.Value) -> np.ndarray[Any, Any]:
    assert value.shape is not None
    assert value.dtype is not None
    return np.broadcast_to(np.zeros((), value.dtype.numpy()), value.shape.numpy())


# ---------------------------------------------------------------------- splitting inference graph and algorithm


def _split_off(model: ir.Model, exported: ir.Model, moments: Mapping[str, ir.Value]) -> onnx.TrainingInfoProto:
    """What of a model the inference graph does not have, as an algorithm."""
    shared = _shared_values(model.graph, exported.graph)
    graph = model.graph
    _give_own_names(graph, exported.graph, shared)
    info = onnx.TrainingInfoProto()
    info.algorithm.name = "training"
    for node in graph:
        if not shared.issuperset(node.outputs):
            node.metadata_props.clear()
            info.algorithm.node.append(ir.to_proto(node))
            if node.domain == TRAINING_DOMAIN:  # onnx infers no types of these operators
                info.algorithm.value_info.extend(ir.to_proto(value) for value in node.outputs)
    for name, value in graph.initializers.items():
        if value not in shared and value.const_value is not None:
            tensor = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=name)
            info.algorithm.initializer.append(ir.to_proto(tensor))
    for name, value in moments.items():
        tensor = ir.Tensor(np.array(_zeros(value)), dtype=value.dtype, name=name)
        info.algorithm.initializer.append(ir.to_proto(tensor))
    inputs = [value for value in graph.inputs if value not in shared and value.name not in moments]
    info.algorithm.input.extend(ir.to_proto(value) for value in inputs)
    info.algorithm.output.extend(ir.to_proto(value) for value in graph.outputs if value not in shared)
    return info


def _shared_values(graph: ir.Graph, inference: ir.Graph) -> set[ir.Value]:
    """Values of the training graph that the inference graph computes under the same name, from the same values."""
    nodes = {str(node.outputs[0].name): node for node in inference if node.outputs}
    inputs = {value.name for value in inference.inputs}
    shared = {value for value in graph.inputs if value.name in inputs}
    shared |= {v for name, v in graph.initializers.items() if name in inference.initializers or name in nodes}
    for node in graph:
        other = nodes.get(str(node.outputs[0].name))
        if other is not None and _same_node(node, other, shared):
            shared.update(node.outputs)
    return shared


def _same_node(node: ir.Node, other: ir.Node, shared: set[ir.Value]) -> bool:
    if node.op_identifier() != other.op_identifier() or len(node.inputs) != len(other.inputs):
        return False
    if [value.name for value in node.outputs] != [value.name for value in other.outputs[: len(node.outputs)]]:
        return False
    for mine, theirs in zip(node.inputs, other.inputs, strict=True):
        if (mine is None) != (theirs is None):
            return False
        if mine is not None and theirs is not None and (mine not in shared or mine.name != theirs.name):
            return False
    return _attributes(node) == _attributes(other)


def _attributes(node: ir.Node) -> dict[str, bytes]:
    return {name: ir.to_proto(one).SerializeToString(deterministic=True) for name, one in node.attributes.items()}


def _give_own_names(graph: ir.Graph, inference: ir.Graph, shared: set[ir.Value]) -> None:
    """No value or node of the algorithm may have a name that the inference graph uses for another."""
    taken = value_names(inference)
    for value in (*graph.inputs, *graph.outputs):
        if value not in shared and value.name in taken:
            raise ModelError(
                f"the training info needs the name {value.name!r}, which is already a value of the model. "
                "Rename it in the model."
            )
    nodes = node_names(inference)
    inner = [value for nested in graph.subgraphs() for value in (*nested.inputs, *nested.initializers.values())]
    inner += [value for node in ir.traversal.RecursiveGraphIterator(graph) for value in node.outputs]
    used = TakenNames(taken | value_names(graph))
    for value in (*graph.initializers.values(), *inner):
        if value not in shared and value.name in taken:
            value.name = free_name(f"{PREFIX}{value.name}", used)
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if node.name in nodes:
            node.name = free_name(f"{PREFIX}{node.name}", nodes)


# ---------------------------------------------------------------------- bindings, initialization, what to say


def _bind(field: Any, bindings: Mapping[str, str]) -> None:
    for key, value in bindings.items():
        field.add(key=key, value=value)


def _add_initialization(info: onnx.TrainingInfoProto, moments: Mapping[str, ir.Value]) -> None:
    info.initialization.name = "initialization"
    for name, value in moments.items():
        shape = ir.Tensor(np.array(_zeros(value).shape, np.int64), name=f"{name}_shape")
        zero = ir.Tensor(np.zeros(1, _zeros(value).dtype), dtype=value.dtype, name="zero")
        nodes = (
            ir.node("Constant", [], {"value": shape}, outputs=[ir.Value(name=f"{name}_shape")]),
            ir.node("ConstantOfShape", [ir.Value(name=f"{name}_shape")], {"value": zero}),
        )
        nodes[1].outputs[0].name = f"{name}_zeros"
        info.initialization.node.extend(ir.to_proto(node) for node in nodes)
        output = ir.Value(name=f"{name}_zeros", type=value.type, shape=value.shape)
        info.initialization.output.append(ir.to_proto(output))
    _bind(info.initialization_binding, {name: f"{name}_zeros" for name in moments})


def _notes(graph: TrainingGraph, optimizer: Optimizer) -> tuple[str, ...]:
    chosen = Counter(
        operator_for(
            optimizer.training_optimizer_name,
            attributes_of_weight(optimizer, name),
            graph.model.graph.initializers[name].dtype,
        )
        for name in graph.weights
    )
    return tuple(
        f"weights updated by the standard's {operator}: {count}."
        if operator
        else f"weights updated by arithmetic: {count}; {reason}."
        for (operator, reason), count in chosen.items()
    )

"""The standard's own training: the `TrainingInfoProto`s of a file as models that can be computed.

An algorithm is combined with the inference graph, as the standard asks; its mutable variables become inputs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.reading.model_file import model_from_proto, prepare_for_lowering, read_proto
from onward.graph.weights.choice import find_running_statistics
from onward.parameters.limits import DEFAULT_LIMITS, Limits


@dataclass(frozen=True, kw_only=True)
class TrainingAlgorithm:
    """One `TrainingInfoProto`, ready for lowering.

    Attributes:
        step: inference graph and algorithm together; features and mutable variables are its inputs.
        outputs: what a step computes for its caller: the outputs of the algorithm, then those of the model.
        updates: mutable variable -> value of `step` that it takes after a step.
        initialization: computes first values of variables; None where there is nothing to compute.
        first_values: variable -> output of `initialization`.
        stored: input of `step` -> its stored value: variables, defaults of the algorithm's inputs, running statistics.
    """

    step: ir.Model
    outputs: tuple[str, ...]
    updates: Mapping[str, str]
    initialization: ir.Model | None
    first_values: Mapping[str, str]
    stored: Mapping[str, ir.TensorProtocol]

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of what a step or the initialization changes."""
        return tuple(dict.fromkeys((*self.updates, *self.first_values)))


def read_training_algorithms(
    source: str | os.PathLike[str] | onnx.ModelProto, limits: Limits = DEFAULT_LIMITS
) -> tuple[TrainingAlgorithm, ...]:
    """Reads every `TrainingInfoProto` of a model, in the order in which they are executed.

    Raises:
        ModelError: the model is broken or carries no `training_info`, a binding names what does not exist, or two
            bindings change the same variable.
    """
    proto, where, folder = read_proto(source)
    if not proto.training_info:
        raise ModelError(
            f"{where} carries no training_info (TrainingInfoProto). `onward export MODEL --run RUN.yaml "
            "--training-info FILE` writes one; `onward train` needs none."
        )
    _check_unique_variables(proto, where)
    bound = {
        entry.key for info in proto.training_info for entry in (*info.update_binding, *info.initialization_binding)
    }
    shared = [tensor.name for tensor in proto.graph.initializer if tensor.name in bound]
    return tuple(
        _read_algorithm(proto, info, f"{where}, training_info[{index}]", folder, shared, limits)
        for index, info in enumerate(proto.training_info)
    )


def _check_unique_variables(proto: onnx.ModelProto, where: str) -> None:
    for field in ("update_binding", "initialization_binding"):
        bound = Counter(entry.key for info in proto.training_info for entry in getattr(info, field))
        twice = [name for name, count in bound.items() if count > 1]
        if twice:
            raise ModelError(f"{where}: {field} names {twice[0]!r} twice; a variable is assigned at most once a step.")


def _read_algorithm(
    proto: onnx.ModelProto,
    info: onnx.TrainingInfoProto,
    where: str,
    folder: Path | None,
    shared: Sequence[str],
    limits: Limits,
) -> TrainingAlgorithm:
    """`shared`: variables of the inference graph, whichever algorithm changes them."""
    combined = _combine(proto, info.algorithm)
    updates = {entry.key: entry.value for entry in info.update_binding}
    first = {entry.key: entry.value for entry in info.initialization_binding}
    initializers = {tensor.name for tensor in combined.graph.initializer}
    outputs = [value.name for value in (*info.algorithm.output, *proto.graph.output)]
    _check_bindings(updates, "update_binding", initializers, outputs, where)
    made = [value.name for value in info.initialization.output]
    _check_bindings(first, "initialization_binding", initializers, made, where)
    if info.initialization.input:
        name = info.initialization.input[0].name
        raise ModelError(f"{where}: its initialization graph has the input {name!r}; the standard gives it none.")
    defaults = {value.name for value in info.algorithm.input} & {tensor.name for tensor in info.algorithm.initializer}
    step = prepare_for_lowering(model_from_proto(combined, where, folder, limits), limits)
    _switch_dropout_off(step)
    statistics = find_running_statistics(step.graph)  # for inputs of the graph the node's `training_mode` decides
    stored = _become_inputs(step, dict.fromkeys((*shared, *updates, *first, *sorted(defaults), *statistics)))
    return TrainingAlgorithm(
        step=step,
        outputs=tuple(dict.fromkeys(outputs)),
        updates=updates,
        initialization=_initialization(proto, info, where, folder, limits) if first else None,
        first_values=first,
        stored=stored,
    )


def _combine(proto: onnx.ModelProto, algorithm: onnx.GraphProto) -> onnx.ModelProto:
    """The inference graph followed by the algorithm, list by list."""
    combined = onnx.ModelProto()
    combined.CopyFrom(proto)
    del combined.training_info[:]
    for field in ("node", "initializer", "sparse_initializer", "input", "output", "value_info"):
        getattr(combined.graph, field).extend(getattr(algorithm, field))
    return combined


def _check_bindings(
    bindings: Mapping[str, str], field: str, variables: Iterable[str], values: Iterable[str], where: str
) -> None:
    known, computed = set(variables), set(values)
    graph = "algorithm" if field == "update_binding" else "initialization"
    for variable, value in bindings.items():
        if variable not in known:
            raise ModelError(
                f"{where}: {field} assigns to {variable!r}, which is no initializer of the model or the algorithm."
            )
        if value not in computed:
            raise ModelError(
                f"{where}: {field} takes the new {variable!r} from {value!r}, which is no output of the {graph} graph."
            )


def _initialization(
    proto: onnx.ModelProto, info: onnx.TrainingInfoProto, where: str, folder: Path | None, limits: Limits
) -> ir.Model:
    alone = onnx.ModelProto()
    alone.CopyFrom(proto)
    del alone.training_info[:]
    alone.graph.CopyFrom(info.initialization)
    return prepare_for_lowering(model_from_proto(alone, f"{where}, initialization", folder, limits), limits)


def _become_inputs(model: ir.Model, names: Iterable[str]) -> dict[str, ir.TensorProtocol]:
    """Takes initializers away and makes them inputs; returns their values."""
    stored = {}
    for name in names:
        value = model.graph.initializers.pop(name)
        assert value.const_value is not None
        stored[name] = value.const_value
        value.const_value = None
        model.graph.inputs.append(value)
    return stored


_MODE_IS_INPUT_SINCE = 12


def _switch_dropout_off(model: ir.Model) -> None:
    """Dropout that its own node does not switch on becomes the identity; elsewhere the network's mode decides."""
    no_dropout: ir.Value | None = None
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain != "" or node.op_type != "Dropout":
            continue
        if model.opset_imports[""] < _MODE_IS_INPUT_SINCE:
            node.attributes["ratio"] = ir.AttrFloat32("ratio", 0.0)
        elif not _switched_on(node):
            no_dropout = no_dropout or NodeWriter(model, "").constant(0.0, "no_dropout", np.float32)
            node.resize_inputs(max(2, len(node.inputs)))
            node.replace_input_with(1, no_dropout)


def _switched_on(node: ir.Node) -> bool:
    """Whether a Dropout node may drop: its `training_mode` is true, or is only known when it runs."""
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    if mode is None:
        return False
    return mode.const_value is None or bool(np.all(mode.const_value.numpy()))

"""A user's own ONNX loss model, merged into the model that it judges."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.losses.values import FLOAT_TYPES, add_label
from onward.graph.merging.merged_graph import at_opset, check_other_domains, move, rename
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.reading.model_file import prepare_for_lowering, read_model
from onward.losses.classes import describe_shape
from onward.parameters.limits import DEFAULT_LIMITS, Limits


@dataclass(frozen=True)
class MergedLoss:
    """What a loss model became in the graph: its loss, its other outputs by name, its labels."""

    loss: ir.Value
    parts: Mapping[str, ir.Value]
    labels: tuple[str, ...]


@dataclass
class _Binding:
    """Inputs of the loss model tied to values of the model, and which of its dimensions that settles."""

    values: dict[ir.Value, ir.Value] = field(default_factory=dict)
    dimensions: dict[str, int | ir.SymbolicDim] = field(default_factory=dict)


def merge_loss_graph(
    writer: NodeWriter,
    path: str | os.PathLike[str],
    inputs: Mapping[str, str],
    output: str | None,
    limits: Limits = DEFAULT_LIMITS,
) -> MergedLoss:
    """Copies the nodes and constants of a loss model into the graph of `writer`, under its prefix.

    An input of the loss model that `inputs` names is tied to that output or input of the model, or becomes a label
    input of that name; one that it does not name goes by its own name.

    Args:
        writer: writes into the model.
        path: of the loss model.
        inputs: input of the loss model -> output of the model or label.
        output: output of the loss model that is the loss; None: the first.
        limits: what the loss model may ask of the machine.

    Raises:
        ModelError: the loss model cannot be read or converted to the model's opset, a name in `inputs` or `output`
            is unknown, types or shapes do not fit, or none of its inputs is an output of the model.
    """
    where = f"loss.graph {str(path)!r}"
    loss_model = at_opset(prepare_for_lowering(read_model(path, limits), limits), writer, where, limits)
    graph = loss_model.graph
    _check_names(graph, inputs, where)
    chosen = _loss_output(graph, output, where)
    check_other_domains(writer, loss_model, where)
    bound = _bind_inputs(writer, graph, inputs, where)
    outputs = {str(value.name): bound.get(value, value) for value in graph.outputs}
    graph.outputs.clear()
    for value, given in bound.items():
        value.replace_all_uses_with(given)
    rename(writer, graph)
    move(writer, graph)
    own = {name: _own(writer, value) for name, value in outputs.items()}
    known = {str(value.name) for value in writer.graph.outputs}
    labels = tuple(str(value.name) for value in bound.values() if value.is_graph_input() and value.name not in known)
    return MergedLoss(own.pop(chosen), own, labels)


def _check_names(graph: ir.Graph, inputs: Mapping[str, str], where: str) -> None:
    known = [str(value.name) for value in graph.inputs]
    for name in inputs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ModelError(
                f"loss.graph_inputs names {name!r}, but the inputs of {where} are {', '.join(known)}{hint}"
            )


def _loss_output(graph: ir.Graph, output: str | None, where: str) -> str:
    names = [str(value.name) for value in graph.outputs]
    if output is not None and output not in names:
        raise ModelError(f"loss.graph_output is {output!r}, but the outputs of {where} are {', '.join(names)}.")
    value = graph.outputs[0 if output is None else names.index(output)]
    if value.dtype is not None and value.dtype not in FLOAT_TYPES:
        raise ModelError(f"{where}: its output {value.name!r} is {value.dtype.name.lower()}; a loss is a float.")
    return str(value.name)


def _bind_inputs(
    writer: NodeWriter, graph: ir.Graph, inputs: Mapping[str, str], where: str
) -> dict[ir.Value, ir.Value]:
    """Ties every input of the loss model to an output of the model or to a label; says which to which."""
    outputs = {str(value.name): value for value in writer.graph.outputs}
    binding = _Binding()
    wanted = {value: inputs.get(str(value.name), str(value.name)) for value in graph.inputs}
    if not any(name in outputs for name in wanted.values()):
        raise ModelError(
            f"{where} reads no output of the model: its inputs are {', '.join(str(v.name) for v in graph.inputs)}, "
            f"the model's outputs {', '.join(outputs)}. Connect them with loss.graph_inputs."
        )
    for value, name in wanted.items():
        if name in outputs:
            binding.values[value] = _fitted(writer, value, outputs[name], binding, where)
    for value, name in wanted.items():
        if value in binding.values:
            continue
        if value.dtype is None:
            raise ModelError(f"{where}: its input {value.name!r} has no element type.")
        shape = None if value.shape is None else [_settled(d, binding) for d in value.shape]
        binding.values[value] = add_label(writer, name, value.dtype, shape, allowed={value.dtype})
    return binding.values


def _settled(dimension: int | ir.SymbolicDim, binding: _Binding) -> int | ir.SymbolicDim:
    if isinstance(dimension, int) or dimension.value is None:
        return dimension
    return binding.dimensions.get(str(dimension.value), dimension)


def _fitted(writer: NodeWriter, value: ir.Value, given: ir.Value, binding: _Binding, where: str) -> ir.Value:
    """The model's output as the loss model's input wants it: floats cast, since they may be computed in 16 bits."""
    if value.shape is not None and given.shape is not None:
        pairs = list(zip(value.shape, given.shape, strict=False))
        clash = [1 for own, other in pairs if isinstance(own, int) and isinstance(other, int) and own != other]
        if len(value.shape) != len(given.shape) or clash:
            raise ModelError(
                f"{where}: its input {value.name!r} is {describe_shape(value)}, but the model's output "
                f"{given.name!r} is {describe_shape(given)}."
            )
        for own, other in pairs:
            if not isinstance(own, int) and own.value is not None:
                binding.dimensions.setdefault(str(own.value), other)
    if value.dtype in FLOAT_TYPES and (given.dtype is None or given.dtype in FLOAT_TYPES):
        cast = writer.cast(given, value.dtype)
        cast.dtype = value.dtype
        cast.shape = given.shape
        return cast
    if value.dtype is None or value.dtype is given.dtype:
        return given
    raise ModelError(
        f"{where}: its input {value.name!r} is {value.dtype.name.lower()}, but the model's output {given.name!r} is "
        f"{given.dtype.name.lower() if given.dtype else 'of unknown type'}."
    )


def _own(writer: NodeWriter, value: ir.Value) -> ir.Value:
    """The output itself if a node of the loss model computes it; else a copy, so that renaming it is harmless."""
    producer = value.producer()
    if producer is not None and str(producer.name).startswith(writer.prefix):
        return value
    copy = writer.apply("Identity", value)
    copy.type, copy.shape = value.type, value.shape
    return copy

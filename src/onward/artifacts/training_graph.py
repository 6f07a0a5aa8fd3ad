"""Loss and gradients, and an entire training step, as ONNX graphs in standard operators, for a plain inference runtime.

The joint graph of forward and backward pass goes through torch's ONNX exporter; weights and gradients then get the
names of the model's initializers back.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes

from onward.artifacts.added_scatters import add_into_scatters
from onward.artifacts.clipped_products import write_clip_gradients_directly, write_masks_at_once
from onward.artifacts.infinite_derivatives import gradients_may_be_infinite
from onward.artifacts.joint_graph import JointGraph, OpenSizes, tensors_of, trace_joint_graph
from onward.artifacts.label_gradients import write_label_gradients_directly
from onward.artifacts.lowered import Lowered
from onward.artifacts.onnx_translation import translate
from onward.artifacts.optimizer_graph import (
    IR_VERSION,
    OPSET,
    append_update,
    gradient_name,
    new_name,
)
from onward.artifacts.segment_assembly import ChainAssembly, take_segments
from onward.artifacts.transposed_products import fold_transposes
from onward.artifacts.wide_scatters import widen_scatters
from onward.errors import ModelError
from onward.graph.writing.model_saving import save_model
from onward.lowering.module import OnnxModule
from onward.parameters import Optimizer

PREFIX = "training/"
"""What the names of all values inside of a training graph begin with."""


def write_training_graph(net: OnnxModule, path: str | os.PathLike[str], sizes: Mapping[str, int] | None = None) -> None:
    """Writes loss and gradients as an ONNX model.

    Inputs: the features and labels; then every trained weight and running statistic under its initializer name, each
    with its present value as default, so that a runtime may leave it out or give another. Outputs: the loss;
    `<weight>_grad` for every trained weight; `<statistic>_new` for every running statistic. The graph means a step of
    training: dropout is on, batch normalization uses the statistics of the batch.

    Args:
        net: from a training graph with a loss, which is its first output.
        path: of the file; weights above 1.5 GB in all go to `<path>.data` next to it.
        sizes: symbolic dimension -> its size. Those that are not in it stay open, as in the model.

    Raises:
        ModelError: the model cannot be written in standard operators, or not with these sizes open.
        ParametersError: `sizes` names a dimension that the model's inputs do not have.
        StorageError: the file cannot be written.
    """
    save_model(build_training_graph(net, sizes), Path(path))


def write_train_step(
    net: OnnxModule, optimizer: Optimizer, path: str | os.PathLike[str], sizes: Mapping[str, int] | None = None
) -> None:
    """Writes an entire step of training as an ONNX model: forward pass, backward pass and weight update.

    Inputs and outputs are those of `write_training_graph` and `write_optimizer_graph` together, without the gradients.

    Raises:
        ModelError, ParametersError, StorageError: as those two do.
    """
    model = build_training_graph(net, sizes)
    graph = model.graph
    produced = {str(value.name): value for value in graph.outputs}
    gradients = {name: produced[gradient_name(name)] for name in net.graph.weights}
    kept = [value for value in graph.outputs if not any(value is gradient for gradient in gradients.values())]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    append_update(model, optimizer, {name: graph.initializers[name] for name in net.graph.weights}, gradients)
    save_model(model, Path(path))


def build_training_graph(
    net: OnnxModule, sizes: Mapping[str, int] | None = None, lowered: Lowered | None = None
) -> ir.Model:
    """The model that `write_training_graph` writes; `lowered` says what it computes in 16 bits."""
    if any(node.op_type == "CTCLoss" for node in net.graph.model.graph):
        raise ModelError(
            "the training graph cannot be written in standard ONNX operators: ONNX has none for loss.type 'ctc'. Train "
            "this model with `onward train`, which needs none."
        )
    joint = trace_joint_graph(net, sizes, lowered)
    tensors = tensors_of(net, joint)
    model = translate(joint.codes, OPSET)
    _check_standard(model)
    write_label_gradients_directly(model)
    fold_transposes(model)
    write_masks_at_once(model)
    widen_scatters(model)
    passes.RemoveUnusedNodesPass()(model)
    dtypes = {name: net.input_dtypes[name] for name in joint.features}
    model = _assembled(model, joint, dtypes | {name: tensor.dtype for name, tensor in tensors.items()})
    add_into_scatters(model)
    if not gradients_may_be_infinite(net.graph.model, lowered is not None):
        write_clip_gradients_directly(model)
    outputs = [net.program.outputs[0], *map(gradient_name, joint.weights), *map(new_name, joint.states)]
    _name_values(model, joint.inputs, outputs)
    _place_tensors(model, joint, tensors)
    _set_shapes(model, joint.sizes)
    return model


def _assembled(model: ir.Model, joint: JointGraph, dtypes: Mapping[str, torch.dtype]) -> ir.Model:
    """The training graph, from the nodes of its segments; inputs and outputs without names."""
    types = {name: ir.TensorType(ir.tensor_adapters.from_torch_dtype(dtypes[name])) for name in joint.inputs}
    inputs = {name: ir.Value(type=type) for name, type in types.items()}
    chain = ChainAssembly(take_segments(model.graph, joint), inputs)
    chain.assemble(joint.uses)
    outputs = [chain.values[joint.loss], *(chain.gradients[name] for name in joint.weights)]
    outputs += [chain.values[name] for name in joint.states]
    constants = [value for value in model.graph.initializers.values() if value.uses()]
    model.graph.initializers.clear()
    graph = ir.Graph(
        list(inputs.values()),
        outputs,
        nodes=chain.nodes,
        initializers=constants,
        opset_imports=dict(model.opset_imports),
        name=model.graph.name,
    )
    whole = ir.Model(graph, ir_version=model.ir_version, producer_name=model.producer_name)
    passes.NameFixPass()(whole)
    return whole


def _check_standard(model: ir.Model) -> None:
    found = {node.domain for node in ir.traversal.RecursiveGraphIterator(model.graph)} - {""}
    if found or model.functions:
        foreign = sorted({n.op_type for n in ir.traversal.RecursiveGraphIterator(model.graph) if n.domain})
        raise ModelError(f"the training graph would need operators outside of the standard: {', '.join(foreign)}.")
    opset = model.opset_imports.get("")
    assert opset == OPSET, f"torch's exporter wrote opset {opset}, asked for {OPSET}"
    model.opset_imports.clear()
    model.opset_imports[""] = OPSET
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "onward", None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.name = "training_graph"


def _name_values(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Names inputs and outputs, and moves everything inside out of their way."""
    graph = model.graph
    name, count = Counter((*inputs, *outputs)).most_common(1)[0]
    if count > 1:
        raise ModelError(
            f"the training graph needs the name {name!r} twice: a weight or feature of the model has a name "
            "that is reserved for a gradient or a result. Rename it in the model."
        )
    _separate_outputs(graph)
    ends = {*graph.inputs, *graph.outputs}
    for nested in (graph, *graph.subgraphs()):
        for name, value in list(nested.initializers.items()):
            value.name = f"{PREFIX}{name}"
        for value in nested.inputs if nested is not graph else ():
            value.name = f"{PREFIX}{value.name}"
    for number, node in enumerate(ir.traversal.RecursiveGraphIterator(graph)):
        node.name = f"{PREFIX}{number}_{node.op_type}"
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            value.shape = None
            if value not in ends and value.name:
                value.name = f"{PREFIX}{value.name}"
    for value, name in zip((*graph.inputs, *graph.outputs), (*inputs, *outputs), strict=True):
        value.name = name
        value.metadata_props.clear()


def _separate_outputs(graph: ir.Graph) -> None:
    """An output that is an input too, or another output, becomes a separate value."""
    seen: set[ir.Value] = set()
    for index, value in enumerate(list(graph.outputs)):
        if value in seen or value.is_graph_input() or value.is_initializer():
            node = ir.Node("", "Identity", [value])
            graph.append(node)
            node.outputs[0].name = f"copy_{index}"
            node.outputs[0].type = value.type
            graph.outputs[index] = node.outputs[0]
        seen.add(value)


def _place_tensors(model: ir.Model, joint: JointGraph, tensors: Mapping[str, torch.Tensor]) -> None:
    """Weights and running statistics become inputs with a default value, constants become initializers alone."""
    graph = model.graph
    changeable = {*joint.weights, *joint.states}
    for value in list(graph.inputs)[len(joint.features) :]:
        value.const_value = ir.tensor_adapters.TorchTensor(tensors[str(value.name)], name=value.name)
        value.shape = ir.Shape(value.const_value.shape)
        if value.name not in changeable:
            graph.inputs.remove(value)
            if not value.uses():
                continue
        graph.register_initializer(value)


def _set_shapes(model: ir.Model, sizes: OpenSizes) -> None:
    """The features' axes get the model's own names; results are of rank 0, or shaped like what they belong to."""
    graph = model.graph
    for value in graph.inputs:
        if str(value.name) in sizes.shapes:
            value.shape = ir.Shape(sizes.shapes[str(value.name)])
    shapes = {gradient_name(str(v.name)): v.shape for v in graph.initializers.values()}
    shapes |= {new_name(str(v.name)): v.shape for v in graph.initializers.values()}
    for value in graph.outputs:
        value.shape = shapes.get(str(value.name), ir.Shape(()))

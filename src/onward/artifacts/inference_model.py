"""`onward.export`: the user's own graph with the trained weights and running statistics, ready for any ONNX runtime.

Files are written next to their place and moved there when they are complete.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
import torch

from onward.artifacts.adapter_merging import Merging
from onward.artifacts.stored_integers import store_integers
from onward.artifacts.stored_values import to_numpy
from onward.errors import ModelError, NoteWarning
from onward.graph.classical.rewriting import AttributeWeight
from onward.graph.nodes.rearrangement import Rearrangement
from onward.graph.quantize_aware.quantizers import Quantizer
from onward.graph.repair.inference_mode import switch_to_inference
from onward.graph.repair.split_weights import Tie
from onward.graph.training_graph import TrainingGraph
from onward.graph.writing.model_saving import has_external_data, save_model
from onward.lowering.module import OnnxModule


def export(net: OnnxModule, path: str | os.PathLike[str]) -> None:
    """Writes the graph a module came from, with the current values of its weights and running statistics.

    Names, opset, metadata, types and `training_info` are the user's own. Dropout and batch normalization that were
    exported in training mode are switched to inference. Models above 1.5 GB, and those that had external data, get
    `<path>.data` next to them.

    Raises:
        StorageError: the disk is full or refuses; what stood at `path` before is still there.
        ModelError: a weight has no place in the user's graph.
    """
    tensors = net.tensors_by_name()
    export_weights(net.graph, lambda name: tensors[name], path)


Read = Callable[[str], torch.Tensor]
"""From the name of a weight or running statistic to its value."""


def export_weights(
    graph: TrainingGraph, read: Read, path: str | os.PathLike[str], describe: Read | None = None
) -> None:
    """`export` of weights that are in no module.

    Args:
        graph: what was trained.
        read: called once for each tensor when it is written; nothing of it is kept.
        path: see `export`.
        describe: gives a tensor of the same shape and type without its values; None: `read` does.

    Warns:
        UserWarning: adapters were merged into quantized weights, with how far that is off.
    """
    merging = Merging(graph, read, describe or read)
    model = inference_model(merging.graph, merging.read, describe=merging.describe)
    save_model(model, Path(path), external=has_external_data(graph.source), readers=(graph.source, graph.model))
    for note in merging.notes:
        warnings.warn(note, NoteWarning, stacklevel=2)


def inference_model(
    graph: TrainingGraph, read: Read, only_initializers: bool = False, describe: Read | None = None
) -> ir.Model:
    """What `export_weights` writes.

    Args:
        graph: with the user's own graph.
        read: gives a weight or running statistic by its name; its tensors are fetched when they are written.
        only_initializers: what the user's graph has as a `Constant` node becomes an initializer, too.
        describe: see `export_weights`.

    Raises:
        ModelError: a weight has no place in the user's graph, or, asked to be an initializer, is in a nested graph.
    """
    model = graph.source.clone()
    model.meta.update(graph.source.meta)
    holders = dict(_places(model))
    merging = Merging(graph, read, describe or read)
    graph, read, describe = merging.graph, merging.read, merging.describe
    read = _used_scales(read, graph.quantizers)
    nodes = _nodes_by_output(model) if graph.attributes else {}
    for name in (*(name for name in graph.exported_weights if name not in graph.ties), *graph.states):
        if name in graph.attributes:
            _set_attribute(nodes, graph.attributes[name], name, read)
            continue
        _set(model, holders, name, lambda name=name: read(name), None, describe(name))  # type: ignore[misc]
    for copy, tie in graph.ties.items():
        if tie.weight in graph.weights:
            example = describe(tie.weight)
            _set(model, holders, copy, lambda tie=tie: read(tie.weight), tie, example)  # type: ignore[misc]
    switch_to_inference(model)
    store_integers(model, graph.quantizers)
    if only_initializers:
        for name in (*graph.exported_weights, *graph.states, *graph.ties):
            if name in graph.attributes:
                raise ModelError(
                    f"the weight {name!r} is an attribute of a node; a TrainingInfoProto can only change initializers. "
                    "Put it in weights_not_to_train."
                )
            _make_initializer(model, holders[name])
    return model


def _used_scales(read: Read, quantizers: Sequence[Quantizer]) -> Read:
    """Scales of quantization-aware training as it computes with them: their absolute values, up to the largest."""
    largest = {one.scale: math.inf if one.largest_scale is None else one.largest_scale for one in quantizers}
    return lambda name: read(name).abs().clamp(max=largest[name]) if name in largest else read(name)


def _nodes_by_output(model: ir.Model) -> dict[str, ir.Node]:
    """Every node, those of nested graphs included, by the names of its outputs."""
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    return {str(value.name): node for node in nodes for value in node.outputs if value.name}


def _set_attribute(nodes: Mapping[str, ir.Node], place: AttributeWeight, name: str, read: Read) -> None:
    """Writes a weight back into the list of floats that it is in the user's graph."""
    node = nodes.get(place.output)
    if node is None or place.attribute not in node.attributes:
        raise ModelError(f"the weight {name!r} cannot be written: no node of the model computes {place.output!r}.")
    tensor = read(name)
    if tensor.is_meta:  # a rehearsal, which has no values
        return
    numbers = tensor.detach().to(device="cpu", dtype=torch.float32).reshape(-1).tolist()
    doc_string = node.attributes[place.attribute].doc_string
    node.attributes[place.attribute] = ir.AttrFloat32s(place.attribute, numbers, doc_string=doc_string)


def _make_initializer(model: ir.Model, value: ir.Value) -> None:
    node = value.producer()
    owner = value.graph if node is None else node.graph
    if owner is not None and owner is not model.graph and str(value.name) not in model.graph.initializers:
        raise ModelError(
            f"the weight {value.name!r} belongs to a nested graph (of an If, Loop or Scan); a TrainingInfoProto can "
            "only change initializers of the main graph. Put it in weights_not_to_train."
        )
    if node is not None and node.op_type == "Constant":
        tensor = node.attributes["value"].value
        _replace_by_initializer(model, node, value, tensor)


def _places(model: ir.Model) -> Iterator[tuple[str, ir.Value]]:
    """Every initializer and every output of a constant node by name, nested graphs included."""
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from graph.initializers.items()
        for node in graph:
            if node.domain == "" and node.op_type in ("Constant", "ConstantOfShape"):
                yield str(node.outputs[0].name), node.outputs[0]


def _set(
    model: ir.Model,
    holders: Mapping[str, ir.Value],
    name: str,
    read: Callable[[], torch.Tensor],
    tie: Tie | None,
    example: torch.Tensor,
) -> None:
    value = holders.get(name)
    if value is None:
        raise ModelError(
            f"the weight {name!r} cannot be written: it is a constant inside a function. "
            "Inline the model's functions first (onnx.inliner.inline_local_functions)."
        )
    tensor = _lazy_tensor(value, name, read, tie, example)
    node = value.producer()
    if node is None:
        value.const_value = tensor
    elif node.op_type == "Constant":
        node.attributes.clear()
        node.attributes["value"] = ir.Attr("value", ir.AttributeType.TENSOR, tensor)
    else:
        _replace_by_initializer(model, node, value, tensor)


def _replace_by_initializer(model: ir.Model, node: ir.Node, value: ir.Value, tensor: ir.LazyTensor) -> None:
    """A node that filled a tensor with one number cannot hold trained values: an initializer of the same name does."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    name = value.name
    initializer = ir.Value(
        name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    value.replace_all_uses_with(initializer, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    value.name = f"{name}_removed"
    graph.register_initializer(initializer)
    if model.ir_version is not None and model.ir_version < 4:
        graph.inputs.append(initializer)  # until IR version 4 every initializer is an input, too


def _lazy_tensor(
    value: ir.Value,
    name: str,
    read: Callable[[], torch.Tensor],
    tie: Tie | None,
    example: torch.Tensor,
) -> ir.LazyTensor:
    """A tensor that is fetched when it is written, in the type the user's graph has for it."""
    dtype = _stored_dtype(value) or ir.tensor_adapters.from_torch_dtype(example.dtype)
    shape = tuple(int(size) for size in example.shape) if tie is None else tie.how.shape_of(tuple(example.shape))
    stored = value.const_value
    if stored is not None and tuple(stored.shape.numpy()) != shape:
        raise ModelError(f"the weight {name!r} has the shape {list(shape)}; the model has {list(stored.shape)} for it.")

    def arrange(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() if tie is None else _rearranged(tensor.detach(), tie.how)

    def load() -> ir.TensorProtocol:
        return ir.Tensor(to_numpy(arrange(read()), dtype, name), dtype=dtype, name=name)

    # What cannot be arranged or converted is found before anything is written.
    arrange(torch.empty_like(example, device="meta"))
    to_numpy(torch.zeros((), dtype=example.dtype), dtype, name)
    return ir.LazyTensor(
        load,
        dtype=dtype,
        shape=ir.Shape(shape),
        name=name,
        doc_string=None if stored is None else stored.doc_string,
        metadata_props={} if stored is None else dict(stored.metadata_props),
    )


def _rearranged(tensor: torch.Tensor, how: Rearrangement) -> torch.Tensor:
    if how.elements is not None and how.shape is not None:
        return tensor.reshape(-1)[torch.from_numpy(how.elements).to(tensor.device)].reshape(how.shape)
    return tensor.permute(how.permutation).expand(how.shape_of(tuple(tensor.shape)))


def _stored_dtype(value: ir.Value) -> ir.DataType | None:
    """The element type that the user's graph has for a weight; a module may have been moved to another."""
    node = value.producer()
    attribute = None if node is None else node.attributes.get("value")
    if attribute is not None:
        return attribute.as_tensor().dtype
    return value.dtype

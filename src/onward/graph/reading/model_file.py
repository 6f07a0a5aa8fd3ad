"""From a file to a checked onnx-ir model; external data stay on disk, memory-mapped, until they are used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.passes import common as passes

from onward.errors import ModelError, chain_of
from onward.graph.nodes.budget import (
    PreparationDeadline,
    check_constants,
    check_message,
    check_shape_numbers,
    check_stored,
)
from onward.graph.nodes.map_types import MAP_TYPES, restore_map_types, without_map_types
from onward.graph.nodes.node_writer import value_names
from onward.graph.nodes.structure import check_proto, check_structure
from onward.graph.reading.constant_fills import fold_constant_fills
from onward.graph.reading.differentiated import enclose_differentiated_graphs
from onward.graph.reading.garbage_collection import without_collection
from onward.graph.reading.sparse_tensors import SPARSE, with_dense_tensors
from onward.graph.reading.tensor_storage import check_tensors, stored_tensors
from onward.onnx_files import load_message
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.remote.copies import local_model
from onward.remote.files import shown
from onward.spelling import shortened

ModelSource = str | os.PathLike[str] | onnx.ModelProto | ir.Model

TRAINING_INFO = "onward.training_info"
"""Key in `ir.Model.meta` of a file's `training_info`, for which onnx-ir has no place; export writes it back."""


@without_collection
def read_model(source: ModelSource, limits: Limits = DEFAULT_LIMITS) -> ir.Model:
    """Reads and checks an ONNX model; the result may be changed without changing `source`.

    Args:
        source: a path, a `ModelProto`, or an onnx-ir model.
        limits: what the model may ask of the machine.

    Raises:
        ModelError: the file is missing or broken, its external data are missing, too short or outside of the
            model's folder, it asks for more than the limits, its opset is unknown, or its graph is not well formed.
    """
    if isinstance(source, ir.Model):
        copy = source.clone()
        copy.meta.update(source.meta)
        return _checked(copy, "the given onnx-ir model", Path(), limits)
    return model_from_proto(*read_proto(source), limits)


def read_proto(source: str | os.PathLike[str] | onnx.ModelProto) -> tuple[onnx.ModelProto, str, Path | None]:
    """A model as a protobuf message, what it is called in errors, and its folder (None: it has none).

    Raises:
        ModelError: the file is missing or is no ONNX model.
    """
    if isinstance(source, onnx.ModelProto):
        return source, "the given ModelProto", None
    path = local_model(Path(source)).absolute()
    where = f"model {shown(source)!r}"
    return _parse(path, where), where, path.parent


def model_from_proto(
    proto: onnx.ModelProto, where: str, folder: Path | None, limits: Limits = DEFAULT_LIMITS
) -> ir.Model:
    """What `read_model` gives for a message whose external data are in `folder`; raises as it does."""
    check_message(proto, where, limits)
    model = _from_proto(proto, where)
    if folder is not None:
        _set_folder(model, folder)
    return _checked(model, where, folder, limits)


def _checked(model: ir.Model, where: str, folder: Path | None, limits: Limits) -> ir.Model:
    check_tensors(model, where, folder)
    check_stored((tensor for _, tensor in stored_tensors(model)), where, limits)
    check_structure(model, where)
    _sort(model, where)
    return model


def _parse(path: Path, where: str) -> onnx.ModelProto:
    """The bytes of a file as a protobuf message; external data stay where they are."""
    try:
        if not path.is_file():
            what = "is a directory" if path.is_dir() else "does not exist"
            raise ModelError(f"{where} {what}; give the path of an .onnx file.")
        size = path.stat().st_size
        if size == 0:
            raise ModelError(f"{where} is empty (0 bytes); it was not written completely.")
        proto = load_message(path)
    except OSError as error:
        raise ModelError(f"{where} cannot be opened: {error.strerror or error}.") from error
    except (ModelError, MemoryError):
        raise
    except DecodeError as error:
        raise ModelError(
            f"{where} ({size} bytes) is not an ONNX file, or is cut off: {error}. Copy or export it again."
        ) from error
    except Exception as error:
        # The readers of the text and JSON forms, chosen by the file's name, have errors of their own.
        raise ModelError(f"{where} is not an ONNX file: {_innermost(error)}") from error
    if not proto.HasField("graph"):
        raise ModelError(f"{where} ({size} bytes) holds no graph: it is not an ONNX model, or is cut off.")
    return proto


def _from_proto(proto: onnx.ModelProto, where: str) -> ir.Model:
    proto, sparse = with_dense_tensors(proto, where)
    check_proto(proto, where)
    proto, maps = without_map_types(proto)
    try:
        model = ir.from_proto(proto)
        model.meta[TRAINING_INFO] = tuple(proto.training_info)
        model.meta[SPARSE] = sparse
        model.meta[MAP_TYPES] = maps
        return model
    except MemoryError:
        raise
    except Exception as error:
        raise ModelError(f"{where} cannot be read: {_innermost(error)}") from error


def restore_kept_fields(proto: onnx.ModelProto, model: ir.Model) -> None:
    """Adds to the message of a model what `read_model` set aside: its `training_info`, and types that are maps."""
    proto.training_info.extend(model.meta.get(TRAINING_INFO) or ())
    restore_map_types(proto, model.meta.get(MAP_TYPES) or {})


def complete_file(model: ir.Model, path: Path) -> None:
    """`restore_kept_fields` for a file that onnx-ir wrote."""
    if model.meta.get(TRAINING_INFO) or model.meta.get(MAP_TYPES):
        proto = load_message(path)
        restore_kept_fields(proto, model)
        onnx.save(proto, path)


def _innermost(error: BaseException) -> BaseException:
    *_, first = chain_of(error)
    return first


def _set_folder(model: ir.Model, folder: Path) -> None:
    """External data are found next to the model, also after a change of the working directory."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        ir.external_data.set_base_dir(graph, folder)


def _sort(model: ir.Model, where: str) -> None:
    """Nodes in topological order, as the standard asks; a cycle has none."""
    if _is_sorted(model.graph, set()):
        return
    try:
        model.graph.sort()
    except ValueError as error:
        cycle = shortened(_nodes_on_cycles(model.graph), 8)
        raise ModelError(f"{where}: its nodes form a cycle, through {cycle}.") from error


def _is_sorted(graph: ir.Graph, outer: set[ir.Value]) -> bool:
    known = outer | set(graph.inputs) | set(graph.initializers.values())
    for node in graph:
        if any(value is not None and value not in known for value in node.inputs):
            return False
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH and not _is_sorted(attribute.as_graph(), known):
                return False
        known.update(node.outputs)
    return True


def _nodes_on_cycles(graph: ir.Graph) -> list[str]:
    """What is left when every node that depends on no other left node was taken away, from both ends."""
    left = list(graph)
    while True:
        made = {value for node in left for value in node.outputs}
        read = {value for node in left for value in node.inputs}
        kept = [node for node in left if made & set(node.inputs) and read & set(node.outputs)]
        if len(kept) == len(left) or not kept:
            return [repr(node.name or node.outputs[0].name) for node in kept or left]
        left = kept


def prepare_for_lowering(model: ir.Model, limits: Limits = DEFAULT_LIMITS) -> ir.Model:
    """A copy in which functions are inlined and every constant is an initializer of the main graph.

    The names of values stay; weights that were `Constant` or `ConstantOfShape` nodes keep the name of that node's
    output.

    Raises:
        ModelError: a function calls itself, a `Constant` node has no value that can be read, or shape arithmetic asks
            for more than the limits.
    """
    maps, deadline = model.meta.get(MAP_TYPES), PreparationDeadline(limits)
    model = model.clone()
    model.meta[MAP_TYPES] = maps
    chain: list[Any] = [
        _open_negative_dimensions,
        passes.InlinePass(),
        passes.RemoveInitializersFromInputsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        fold_constant_fills,
        _copy_initializers_that_are_nested_outputs,
        _own_names_of_nested_initializers,
        passes.LiftSubgraphInitializersToMainGraphPass(),
        enclose_differentiated_graphs,
        passes.TopologicalSortPass(),
    ]
    try:
        for one in chain:
            one(model)
            deadline.check(getattr(one, "__name__", type(one).__name__))
    except ModelError:
        raise
    except (ValueError, TypeError, RuntimeError, ir.passes.InvariantError, ir.passes.PassError) as error:
        raise ModelError(f"the model cannot be prepared for lowering: {_innermost(error)}") from error
    check_shape_numbers(model.graph, limits)
    check_constants(model.graph, limits)
    return model


def _open_negative_dimensions(model: ir.Model) -> None:
    """Some exporters write -1 for a dimension that is open, as ONNX Runtime reads it."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None and any(isinstance(size, int) and size < 0 for size in value.shape):
            value.shape = ir.Shape([None if isinstance(size, int) and size < 0 else size for size in value.shape])


def _copy_initializers_that_are_nested_outputs(model: ir.Model) -> None:
    """A branch that gives out a stored tensor as it is gets an `Identity`: its output must be its own."""
    for graph in model.graph.subgraphs():
        for index, value in enumerate(graph.outputs):
            if value.is_initializer() and value.graph is graph:
                node = ir.node("Identity", [value], name=f"copy_{value.name}")
                node.outputs[0].name = f"{value.name}_out"
                node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
                graph.append(node)
                graph.outputs[index] = node.outputs[0]


def _own_names_of_nested_initializers(model: ir.Model) -> None:
    """Lifting renames a nested tensor whose name is taken; onnx-ir would rename the one it shares with the source."""
    taken = value_names(model.graph)
    seen = {*model.graph.initializers, *(value.name for node in model.graph for value in node.outputs)}
    for graph in model.graph.subgraphs():
        for name, value in list(graph.initializers.items()):
            tensor = value.const_value
            if name in seen and tensor is not None:
                value.const_value = ir.LazyTensor(
                    lambda tensor=tensor: tensor,  # type: ignore[misc]
                    dtype=tensor.dtype,
                    shape=ir.Shape(tensor.shape.numpy()),
                    name=name,
                )
                count = 1
                while (unique := f"{name}_{count}") in taken:
                    count += 1
                taken.add(unique)
                value.name = unique
            seen.add(name)

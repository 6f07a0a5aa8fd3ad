"""The export of a trained model, rehearsed before training: everything but the values is assembled and the disk asked.

What cannot be exported at the end of a run is found out before its first step.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import onnx_ir as ir

from onward.artifacts.inference_model import Read, inference_model
from onward.exclusive.temporary import temporary_folder
from onward.graph.training_graph import TrainingGraph
from onward.graph.writing.model_saving import storage_error


def rehearse_export(graph: TrainingGraph, describe: Read, path: Path | None) -> None:
    """Does what `export_weights` does, without reading or writing a value; its time is that of the graph's nodes.

    Args:
        graph: what is to be trained.
        describe: a tensor of the shape and type of each weight and running statistic, whatever its values.
        path: where the model goes; None: that is not known yet.

    Raises:
        StorageError: the model cannot be written there.
        ModelError: a weight has no place in the user's graph, or one of another shape.
    """
    model = inference_model(graph, describe)
    total_bytes = _remove_values(model)
    ir.to_proto(model)
    if path is not None:
        _check_place(path, total_bytes)


def _remove_values(model: ir.Model) -> int:
    """Takes the values out of all tensors of a model, in place; returns the bytes of what they were."""
    total_bytes = 0
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype is not ir.DataType.STRING:
                total_bytes += value.const_value.nbytes
                value.const_value = _outline(value.const_value)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.type is ir.AttributeType.TENSOR and isinstance(attribute.value, ir.LazyTensor):
                    total_bytes += attribute.value.nbytes
                    node.attributes[name] = ir.Attr(name, ir.AttributeType.TENSOR, _outline(attribute.value))
    return total_bytes


def _outline(tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    shape = ir.Shape(tensor.shape.numpy())
    return ir.ExternalTensor("rehearsed", 0, tensor.nbytes, tensor.dtype, shape=shape, name=str(tensor.name))


def _check_place(path: Path, total_bytes: int) -> None:
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(path) as folder:
            (folder / path.name).touch()
        if shutil.disk_usage(path.parent).free < total_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    except OSError as error:
        raise storage_error(path, total_bytes, error) from error

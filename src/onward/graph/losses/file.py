"""The user's own graph with its loss, as a file: what `paths.model_with_loss_func_path` asks for."""

from __future__ import annotations

import os
from pathlib import Path

from onward.errors import ModelError
from onward.graph.losses.adding import add_loss
from onward.graph.losses.spec import LossNames, LossSpec
from onward.graph.reading.model_file import ModelSource, read_model
from onward.graph.writing.model_saving import save_model
from onward.losses import registry
from onward.losses.info_nce import GATHER_REPLICAS


def write_model_with_loss(source: ModelSource, spec: LossSpec, path: str | os.PathLike[str]) -> LossNames:
    """Writes the user's graph with the loss added: label inputs, loss nodes, loss outputs.

    Args:
        source: the model; it is not changed.
        spec: which loss, and what the model may ask of the machine.
        path: of the file to write; weights above 1.5 GB in all go to `<path>.data` next to it.

    Raises:
        ModelError: the model cannot be read, the loss cannot be added to it, or `path` is the model itself.
        StorageError: the file system refuses.
    """
    target = Path(path)
    if isinstance(source, str | os.PathLike) and target.resolve() == Path(source).resolve():
        raise ModelError(f"the model with its loss cannot be written over the model itself, {str(target)!r}.")
    if any(kind.name == spec.type and not kind.has_operators for kind in registry.LOSSES):
        raise ModelError(
            f"loss.type is {spec.type!r}, for which ONNX has no operator; the model with its loss is no ONNX file."
        )
    model = read_model(source, spec.limits)
    names = add_loss(model, spec, count_correct=True)
    for node in model.graph:
        if node.op_type == GATHER_REPLICAS:
            node.op_type, node.domain = "Identity", ""
    save_model(model, target)
    return names

"""The user's own graph with its loss, as a file: what `paths.model_with_loss_func_path` asks for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import onnx_ir as ir

from onward.errors import ModelError, StorageError
from onward.graph.losses.adding import LossNames, LossSpec, add_loss
from onward.graph.reading.model_file import ModelSource, complete_file, read_model

LARGEST_INLINE_BYTES = 1 << 30
"""Above this, weights go to a file beside the model: one protobuf holds at most 2 GiB."""


def write_model_with_loss(source: ModelSource, spec: LossSpec, path: str | os.PathLike[str]) -> LossNames:
    """Writes the user's graph with the loss added: label inputs, loss nodes, loss outputs.

    Args:
        source: the model; it is not changed.
        spec: which loss, and what the model may ask of the machine.
        path: of the file to write; weights above 1 GiB in all go to `<path>.data` beside it.

    Raises:
        ModelError: the model cannot be read, the loss cannot be added to it, or `path` is the model itself.
        StorageError: the file system refuses.
    """
    target = Path(path)
    if isinstance(source, str | os.PathLike) and target.resolve() == Path(source).resolve():
        raise ModelError(f"the model with its loss cannot be written over the model itself, {str(target)!r}.")
    if spec.type == "ctc":
        raise ModelError("loss.type is 'ctc', for which ONNX has no operator; the model with its loss is no ONNX file.")
    model = read_model(source, spec.limits)
    names = add_loss(model, spec, count_correct=True)
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    external = any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors)
    beside = None
    if external or sum(tensor.nbytes for tensor in tensors) > LARGEST_INLINE_BYTES:
        beside = f"{target.name}.data"
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        ir.save(model, partial, format="protobuf", external_data=beside)
        complete_file(model, partial)
        os.replace(partial, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise StorageError(
            f"the model with its loss cannot be written to {str(target)!r}: {error.strerror or error}. "
            "Name a file in a folder that can be written."
        ) from error
    return names

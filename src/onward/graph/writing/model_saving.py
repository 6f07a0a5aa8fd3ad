"""Writing ONNX files: next to their place first, and moved there when they are complete.

A failure, or a second process, leaves the files that were there before.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx_ir as ir

from onward.errors import StorageError
from onward.exclusive.temporary import temporary_folder
from onward.graph.reading.model_file import complete_file, read_model
from onward.graph.writing.streamed_file import write_streamed
from onward.parameters.limits import UNLIMITED
from onward.retries import persistently

EXTERNAL_ABOVE_BYTES = 1_500_000_000
"""Protobuf ends at 2 GiB; above this, weights go to a file next to the model."""


def has_external_data(model: ir.Model) -> bool:
    """Whether some of its weights are in files next to it."""
    return any(isinstance(tensor, ir.ExternalTensor) for tensor in _initial_tensors(model))


def _initial_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value


def save_model(model: ir.Model, path: Path, external: bool = False, readers: Iterable[ir.Model] = ()) -> None:
    """Writes to a temporary folder next to the target and moves the files in place when they are complete.

    Args:
        model: what to write.
        path: where to; `<path>.data` next to it holds the weights of models above 1.5 GB.
        external: write weights there in any case; so it is where some are external now.
        readers: models that may read the file that is replaced; they read the new one from then on.

    Raises:
        StorageError: the disk is full or refuses; the files that were there before stay.
    """
    total = sum(tensor.nbytes for tensor in _initial_tensors(model))
    external = external or total > EXTERNAL_ABOVE_BYTES or has_external_data(model)
    data = f"{path.name}.data" if external else None
    _load_attributes(model)

    def write() -> None:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(path) as folder:
            written = folder / path.name
            if data is None:
                write_streamed(model, written)
            else:
                ir.save(model, written, external_data=data)
                complete_file(model, written)
            if data is not None and (folder / data).exists():
                _replace_both(folder, path, data)
                for reader in readers:
                    _read_from_new_file(reader, path, path.parent / data)
            else:
                os.replace(written, path)

    try:
        persistently(write, f"writing {path}")
    except OSError as error:
        raise storage_error(path, total, error) from error


def _load_attributes(model: ir.Model) -> None:
    """Tensors of attributes cannot be external in a file of another folder: they are written into the model."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in ir.traversal.RecursiveGraphIterator(graph):
            for name, attribute in list(node.attributes.items()):
                if attribute.type is ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                    tensor = ir.Tensor(attribute.value.numpy(), dtype=attribute.value.dtype, name=attribute.value.name)
                    node.attributes[name] = ir.Attr(name, ir.AttributeType.TENSOR, tensor)


def _replace_both(folder: Path, path: Path, data: str) -> None:
    """Moves model and data in place; if the model cannot be moved, the data that were there come back."""
    target, before = path.parent / data, folder / f"{data}.before"
    if target.exists():
        os.replace(target, before)
    try:
        os.replace(folder / data, target)
        os.replace(folder / path.name, path)
    except OSError:
        if before.exists():
            os.replace(before, target)
        raise


def _read_from_new_file(reader: ir.Model, path: Path, data: Path) -> None:
    """A model that was read from the replaced file finds its tensors in the new one, by name."""
    written: ir.Model | None = None
    for graph in reader.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and Path(tensor.path).resolve() == data.resolve():
                written = written or read_model(path, UNLIMITED)
                found = written.graph.initializers.get(name)
                if found is not None and found.const_value is not None:
                    value.const_value = found.const_value


def storage_error(path: Path, needed_bytes: int, error: OSError) -> StorageError:
    """Why a model cannot be written, with what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = next(folder for folder in path.absolute().parents if folder.is_dir())
        free = shutil.disk_usage(folder).free
        return StorageError(
            f"the model {str(path)!r} needs about {needed_bytes:,} bytes; the disk has {free:,} free. "
            "Free some space, or choose another output_dir."
        )
    return StorageError(
        f"the model {str(path)!r} cannot be written: {error.strerror or error}. "
        "Choose another path, or make this one writable."
    )

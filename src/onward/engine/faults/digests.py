"""What every process of a run must have alike, as digests that can be compared: parameters, model, data, versions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch

from onward import __version__
from onward.errors import ModelError
from onward.graph.training_graph import TrainingGraph
from onward.parameters import Parameters
from onward.parameters.yaml_file import to_plain
from onward.remote.files import is_folder, list_folder
from onward.untrusted_files import open_regular

_SHORT = 24
"""Characters of a value that is shown as it is."""


def digests_of(parameters: Parameters, graph: TrainingGraph) -> dict[str, str]:
    """Name -> digest, or the value itself where it is short: versions, fields of RUN.yaml, files.

    Where files are does not count, since machines may keep the same files in different places; what is in them does.
    """
    found = {
        "onward": __version__,
        "torch": torch.__version__.split("+")[0],
        "model": _of_model(parameters.model_files, graph),
        "loss.graph": _of_file(parameters.loss.graph),
        "loss.reference_model_path": _of_file(parameters.loss.reference_model_path),
        "teacher": _of_file(parameters.distillation.teacher_path),
        "evaluation model": _of_file(parameters.paths.eval_model_path),
        **_of_round(parameters),
    }
    for number, later in enumerate(parameters.next_rounds, 2):
        found |= {f"round {number}: {name}": digest for name, digest in _of_round(later).items()}
    return found


def _of_round(parameters: Parameters) -> dict[str, str]:
    paths = parameters.paths
    return {
        **_of_fields(parameters),
        "names of the training data": _of_listing(paths.train_data_dir),
        "names of the test data": _of_listing(paths.test_data_dir),
    }


def _of_fields(parameters: Parameters) -> dict[str, str]:
    """`section.field` -> its value as text, so that what differs is named; fields that hold paths are left out."""
    found = {}
    for section in dataclasses.fields(parameters):
        held = getattr(parameters, section.name)
        if not dataclasses.is_dataclass(held):
            continue
        for one in dataclasses.fields(held):
            if "Path" not in str(one.type):
                text = json.dumps(to_plain(getattr(held, one.name)), sort_keys=True, default=str)
                found[f"{section.name}.{one.name}"] = text if len(text) <= _SHORT else _of_text(text)
    return found


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _of_model(paths: Iterable[Path], graph: TrainingGraph) -> str:
    """The bytes of the files themselves, and names and shapes of what may be in other files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(_of_file(path).encode())
    for name, value in graph.model.graph.initializers.items():
        digest.update(f"{name} {value.shape} {value.dtype};".encode())
    return digest.hexdigest()


def _of_file(path: Path | None) -> str:
    if path is None:
        return "none"
    try:
        with open_regular(path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(
            f"model {str(path)!r} cannot be read: {error.strerror or error}. Give the path of an .onnx file."
        ) from error


def _of_listing(folder: Path | None) -> str:
    if folder is None or not is_folder(folder):
        return "none"
    files = [entry for entry in list_folder(folder) if entry.name.endswith(".pb")]
    return _of_text(";".join(f"{file.name} {file.size_bytes}" for file in files))

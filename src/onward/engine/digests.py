"""What every process of a run must have alike, as digests that can be compared: parameters, model, data, versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch

from onward import __version__
from onward.graph.training_graph import TrainingGraph
from onward.parameters import Parameters


def digests_of(parameters: Parameters, graph: TrainingGraph) -> dict[str, str]:
    """Name -> digest; paths do not count, since machines may keep the same files in different places."""
    sections = parameters.to_mapping()
    sections.pop("paths", None)
    paths = parameters.paths
    return {
        "onward": __version__,
        "torch": torch.__version__.split("+")[0],
        "parameters": _of_text(json.dumps(sections, sort_keys=True, default=str)),
        "model": _of_model(paths.model_path, graph),
        "names of the training data": _of_listing(paths.train_data_dir),
        "names of the test data": _of_listing(paths.test_data_dir),
    }


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _of_model(path: Path, graph: TrainingGraph) -> str:
    """The bytes of the file itself, and names and shapes of what may lie in other files."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    for name, value in graph.model.graph.initializers.items():
        digest.update(f"{name} {value.shape} {value.dtype};".encode())
    return digest.hexdigest()


def _of_listing(folder: Path | None) -> str:
    if folder is None or not folder.is_dir():
        return "none"
    files: Iterable[Path] = sorted(folder.glob("*.pb"))
    return _of_text(";".join(f"{file.name} {file.stat().st_size}" for file in files))

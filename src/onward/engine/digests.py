"""What every process of a run must have alike, as digests that can be compared: parameters, model, data, versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from onward import __version__
from onward.graph.training_graph import TrainingGraph
from onward.parameters import Parameters

_SHORT = 24
"""Characters of a value that is shown as it is."""


def digests_of(parameters: Parameters, graph: TrainingGraph) -> dict[str, str]:
    """Name -> digest, or the value itself where it is short: versions, fields of RUN.yaml, files.

    Paths do not count, since machines may keep the same files in different places.
    """
    sections = parameters.to_mapping()
    sections.pop("paths", None)
    sections["distributed"].pop("pipeline_stage_paths")
    paths = parameters.paths
    return {
        "onward": __version__,
        "torch": torch.__version__.split("+")[0],
        **_of_fields(sections),
        "model": _of_model(parameters.model_files, graph),
        "names of the training data": _of_listing(paths.train_data_dir),
        "names of the test data": _of_listing(paths.test_data_dir),
    }


def _of_fields(sections: Mapping[str, Any]) -> dict[str, str]:
    """`section.field` -> its value as text, so that what differs is named."""
    found = {}
    for section, held in sections.items():
        fields = (
            {f"{section}.{name}": value for name, value in held.items()} if isinstance(held, dict) else {section: held}
        )
        for name, value in fields.items():
            text = json.dumps(value, sort_keys=True, default=str)
            found[name] = text if len(text) <= _SHORT else _of_text(text)
    return found


def _of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _of_model(paths: Iterable[Path], graph: TrainingGraph) -> str:
    """The bytes of the files themselves, and names and shapes of what may lie in other files."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    for name, value in graph.model.graph.initializers.items():
        digest.update(f"{name} {value.shape} {value.dtype};".encode())
    return digest.hexdigest()


def _of_listing(folder: Path | None) -> str:
    if folder is None or not folder.is_dir():
        return "none"
    files: Iterable[Path] = sorted(folder.glob("*.pb"))
    return _of_text(";".join(f"{file.name} {file.stat().st_size}" for file in files))

"""What a training with adapters leaves: the merged model, a PEFT folder, an adapter of ONNX Runtime, as asked for."""

from __future__ import annotations

from pathlib import Path

from onward.artifacts.adapter_files import (
    ADAPTER_ENDING,
    base_path_of,
    check_peft,
    check_runtime_adapter,
    write_peft,
    write_runtime_adapter,
)
from onward.artifacts.inference_model import Read, export_weights
from onward.graph.training_graph import TrainingGraph
from onward.onnx_files import external_locations, load_message
from onward.parameters import Adapter
from onward.parameters.adapter import AdapterOutput


def place_of(form: AdapterOutput, path: Path) -> Path:
    """Where a form goes of a model whose merged form goes to `path`."""
    if form == "peft":
        return path.with_name(f"{path.stem}_peft")
    return path.with_suffix(ADAPTER_ENDING) if form == "onnx_adapter" else path


def written_paths(settings: Adapter, path: Path) -> list[Path]:
    """All files and folders that `write_outputs` wrote, with the files in which models keep their weights."""
    places = [place_of(form, path) for form in settings.outputs]
    places += [base_path_of(place) for place in places if place.suffix == ADAPTER_ENDING]
    return [file for place in places for file in (place, *_data_of(place))]


def _data_of(path: Path) -> list[Path]:
    data = path.with_name(f"{path.name}.data")
    if not data.exists():
        return []
    return [data] if data.name in external_locations(load_message(path)) else []


def write_form(
    form: AdapterOutput, graph: TrainingGraph, read: Read, path: Path, settings: Adapter, describe: Read | None = None
) -> None:
    """Writes one form to its place.

    Args:
        form: which.
        graph: what was trained.
        read: gives weights and running statistics by name.
        path: a folder for PEFT, else a file.
        settings: the section `adapter` that the run had.
        describe: see `export_weights`.

    Raises:
        ParametersError: the form has no place for what was trained.
        StorageError: it cannot be written.
    """
    if form == "peft":
        write_peft(graph, read, path, settings)
    elif form == "onnx_adapter":
        write_runtime_adapter(graph, read, path)
    else:
        export_weights(graph, read, path, describe)


def write_outputs(graph: TrainingGraph, read: Read, path: Path, settings: Adapter) -> None:
    """Writes all forms that `adapter.outputs` names, next to `path`, the place of the merged one."""
    for form in settings.outputs:
        write_form(form, graph, read, place_of(form, path), settings)


def check_outputs(graph: TrainingGraph, settings: Adapter) -> None:
    """Refuses, before training, forms that have no place for what is to be trained.

    Raises:
        ParametersError: naming what has no place.
    """
    if "peft" in settings.outputs:
        check_peft(graph, settings)
    if "onnx_adapter" in settings.outputs:
        check_runtime_adapter(graph)

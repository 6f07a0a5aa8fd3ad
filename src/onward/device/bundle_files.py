"""A device bundle on disk: its graphs, its weights, and the manifest that describes them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onward import __version__
from onward.device.layout import DeviceGraphs, StateTensor
from onward.device.weight_files import Place, save_with_shared_weights, save_with_weights_inside
from onward.engine.inputs.index_ranges import IndexRange
from onward.errors import StorageError
from onward.exclusive.temporary import temporary_folder
from onward.losses.labels import LabelRange
from onward.untrusted_files import sha256_of

FORMAT = "onward-device"
VERSION = 1
REQUIREMENTS = frozenset({"accumulation", "class_labels", "table_rows", "weights_inside"})
"""All that `requires` of a manifest may name."""

MANIFEST = "manifest.json"


def save_bundle(graphs: DeviceGraphs, folder: Path, *, weights_inside: bool = False) -> Path:
    """Writes a bundle next to its place first, and moves it there when it is complete.

    Args:
        graphs: of the bundle.
        folder: where it goes.
        weights_inside: every graph's file has its own tensors; otherwise one file has those of all graphs.

    Raises:
        ModelError: a graph with its tensors is larger than an ONNX file can be.
        StorageError: a file cannot be written, or the folder holds something else.
    """
    if folder.exists() and not _is_bundle(folder):
        raise StorageError(f"{folder} exists and holds no device bundle. Choose another folder, or remove it.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder) as workplace:
            new = workplace / "bundle"
            new.mkdir()
            _write(graphs, new, weights_inside)
            if folder.exists():
                os.replace(folder, workplace / "before")
            os.replace(new, folder)
    except OSError as error:
        raise StorageError(
            f"the device bundle {folder} cannot be written: {error.strerror or error}. Choose another folder."
        ) from error
    return folder


def _is_bundle(folder: Path) -> bool:
    return folder.is_dir() and ((folder / MANIFEST).is_file() or not any(folder.iterdir()))


def _write(graphs: DeviceGraphs, folder: Path, weights_inside: bool) -> None:
    starts = save_with_weights_inside(graphs, folder) if weights_inside else save_with_shared_weights(graphs, folder)
    files = sorted(path.name for path in folder.iterdir())
    state = {one.name for one in graphs.state}
    inputs = graphs.models["step" if "step" in graphs.models else "train"].graph.inputs
    features = [value for value in inputs if value.name not in state]
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "written_by": f"onward {__version__}",
        "requires": [*_required_of_clients(graphs), *(["weights_inside"] * weights_inside)],
        "graphs": {
            name: {
                "file": f"{name}.onnx",
                "inputs": [_described(value) for value in model.graph.inputs],
                "outputs": [_described(value) for value in model.graph.outputs],
            }
            for name, model in graphs.models.items()
        },
        "features": [_described(value) | _about_numbers(value, graphs) for value in features],
        "state": [_state(one, starts) for one in graphs.state],
        "metrics": [
            {"name": one.name, "total_of": list(one.total_of)}
            if one.total_of
            else {"name": one.name, "sum": one.sum, "count": one.count}
            for one in graphs.metrics
        ],
        **graphs.about,
        "files": {name: sha256_of(folder / name) for name in files},
    }
    manifest["identity"] = hashlib.sha256(
        json.dumps([manifest[part] for part in ("version", "state", "files")], sort_keys=True).encode()
    ).hexdigest()
    (folder / MANIFEST).write_text(_lines_of(manifest), encoding="utf-8")


def _lines_of(manifest: Mapping[str, Any]) -> str:
    """JSON with a line for each part and each element of a list of parts, and no spaces: there are thousands."""
    parts = []
    for name, value in manifest.items():
        is_list = isinstance(value, list) and len(value) > 1
        entries = ",\n  ".join(map(_compact, value)) if is_list else _compact(value)
        parts.append(f' "{name}":' + (f"[\n  {entries}\n ]" if is_list else entries))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _required_of_clients(graphs: DeviceGraphs) -> list[str]:
    """What a client has to know beside the loop; one that does not know a name here refuses the bundle."""
    return [
        *(["accumulation"] if "update" in graphs.models else []),
        *(["class_labels"] if any(isinstance(one, LabelRange) for one in graphs.feature_ranges.values()) else []),
        *(["table_rows"] if any(isinstance(one, IndexRange) for one in graphs.feature_ranges.values()) else []),
    ]


def _described(value: ir.Value) -> dict[str, Any]:
    shape = None if value.shape is None else [s if isinstance(s, int) else (s.value or "?") for s in value.shape]
    return {"name": value.name, "dtype": _dtype_name(value.dtype), "shape": shape}


def _about_numbers(feature: ir.Value, graphs: DeviceGraphs) -> dict[str, Any]:
    """Whether a feature is a label, and which numbers clients accept; of halves, which they hold as bits, all."""
    name, about = str(feature.name), dict[str, Any]()
    found = None if feature.dtype is ir.DataType.FLOAT16 else graphs.feature_ranges.get(name)
    if isinstance(found, LabelRange):
        about = {"classes": found.classes, "ignored_label": found.ignored}
    elif found is not None:
        about = {"rows": found.rows}
    return {"is_label": name in graphs.labels, **about}


def _dtype_name(dtype: ir.DataType | None) -> str | None:
    if dtype is None:
        return None
    return "string" if dtype is ir.DataType.STRING else str(dtype.numpy().name)


def _state(one: StateTensor, starts: Mapping[str, Place]) -> dict[str, Any]:
    described = {"name": one.name, "dtype": _dtype_name(one.dtype), "shape": list(one.shape), "kind": one.kind}
    if one.name in starts:
        return described | {"start": asdict(starts[one.name])}
    return described | {"start": {"value": 0 if one.start is None else one.start.numpy().item()}}

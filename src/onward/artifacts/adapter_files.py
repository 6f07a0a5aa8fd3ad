"""Adapters as files of their own: a folder for PEFT, an adapter for ONNX Runtime with the graph that takes it."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onward.artifacts.adapter_merging import Merging, Read
from onward.artifacts.inference_model import inference_model
from onward.artifacts.stored_values import to_numpy
from onward.errors import ParametersError, StorageError
from onward.exclusive.temporary import temporary_folder
from onward.graph.adapters.adapted import AdaptedWeight
from onward.graph.adapters.peft_names import PREFIX, peft_keys, peft_module
from onward.graph.adapters.runtime_graph import with_optional_adapters
from onward.graph.adapters.start_files import CONFIG_NAME, TENSORS_NAME
from onward.graph.adapters.uses import Reading
from onward.graph.nodes.provenance import ModulePaths, module_scope, path_scope
from onward.graph.training_graph import TrainingGraph
from onward.graph.writing.model_saving import has_external_data, save_model
from onward.lowering.kernels.dtypes import tensor_from_ir
from onward.parameters import Adapter

ADAPTER_ENDING = ".onnx_adapter"


def factors(graph: TrainingGraph, adapted: AdaptedWeight, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B that go with the user's own weight; what the weight lost to them at the beginning is taken off again.

    Then the rank is twice that of the training: `B A - B0 A0` is the product of `[B, -B0]` and `[A; A0]`.
    """
    a, b = (read(name).detach().cpu().contiguous() for name in (adapted.a, adapted.b))
    if not adapted.is_residual:
        return a, b
    first = {name: graph.model.graph.initializers[name].const_value for name in (adapted.a, adapted.b)}
    a0, b0 = (tensor_from_ir(value, name).to(a.dtype) for name, value in first.items() if value is not None)
    axes = adapted.rank_axes
    return torch.cat([a, a0], axes[adapted.a]), torch.cat([b, -b0], axes[adapted.b])


def base_path_of(path: Path) -> Path:
    """Where the graph goes that takes the adapter of a file."""
    return path.with_name(f"{path.name.removesuffix(ADAPTER_ENDING)}_base.onnx")


def check_runtime_adapter(graph: TrainingGraph) -> None:
    """Refuses what ONNX Runtime's adapters have no place for.

    Raises:
        ParametersError: nothing is adapted.
        ModelError: a weight cannot be adapted, or be an input, in the user's own graph.
    """
    _require_adapters(graph, "an .onnx_adapter")
    with_optional_adapters(graph.source, graph.adapters, graph.ties, _changed_tensors(graph))


def _trained_in_full(graph: TrainingGraph) -> tuple[str, ...]:
    """Weights that are trained next to adapters."""
    adapters = {name for one in graph.adapters.values() for name in one.names}
    return tuple(name for name in graph.exported_weights if name not in adapters | graph.frozen.keys())


def _changed_tensors(graph: TrainingGraph) -> list[str]:
    """Stored tensors of the user's graph that are not adapted and that training changes, running statistics too."""
    full = _trained_in_full(graph)
    own = [name for name in full if name not in graph.ties]
    return [*own, *(copy for copy, tie in graph.ties.items() if tie.weight in full), *graph.states]


def write_runtime_adapter(graph: TrainingGraph, read: Read, path: Path) -> tuple[Path, Path]:
    """Writes an adapter of ONNX Runtime, and next to it the user's graph that takes it as optional inputs.

    Returns:
        The adapter and the graph.

    Raises:
        ParametersError: onnxruntime is not installed, or the adapters do not fit into such a file.
        ModelError: a weight cannot be adapted in the user's own graph.
        StorageError: the files cannot be written.
    """
    try:
        from onnxruntime import AdapterFormat, OrtValue
    except ImportError as error:
        raise ParametersError(
            'onnxruntime writes .onnx_adapter files and is not installed; run pip install "onward[export]".'
        ) from error
    check_runtime_adapter(graph)
    full = _changed_tensors(graph)
    model, base = with_optional_adapters(graph.source, graph.adapters, graph.ties, full), base_path_of(path)
    values: dict[str, torch.Tensor] = {}
    for adapted in graph.adapters.values():
        a, b = factors(graph, adapted, read)
        values |= {adapted.a: a, adapted.b: b * adapted.scale}
        if adapted.has_magnitude:
            values[adapted.factor] = Merging(graph, read, read).factor(adapted.weight)
    types = {str(value.name): value.dtype or ir.DataType.FLOAT for value in model.graph.inputs}
    arrays = {name: to_numpy(tensor, types[name], name) for name, tensor in values.items()}
    trained = inference_model(replace(graph, weights=_trained_in_full(graph), adapters={}), read).graph.initializers
    arrays |= {name: tensor.numpy() for name in full if (tensor := trained[name].const_value) is not None}
    written = AdapterFormat()
    written.set_adapter_version(1)
    written.set_model_version(1)
    written.set_parameters(
        {name: OrtValue.ortvalue_from_numpy_with_onnx_type(array, types[name]) for name, array in arrays.items()}
    )
    with _written_next_to(path) as folder:
        written.export_adapter(str(folder / path.name))
        save_model(model, base, external=has_external_data(graph.source), readers=(graph.source,))
        os.replace(folder / path.name, path)
    return path, base


def check_peft(graph: TrainingGraph, settings: Adapter) -> None:
    """Refuses what a PEFT folder has no place for.

    Raises:
        ParametersError: nothing is adapted, or a weight has no module that PEFT adapts.
    """
    _require_adapters(graph, "a PEFT folder")
    paths = ModulePaths.of(graph.source.graph)
    for weight, adapted in graph.adapters.items():
        module = peft_module(weight, graph.known_as, settings.module_prefix)
        is_layer = adapted.reading is not Reading.OTHER and (
            len(adapted.shape) == 2 or adapted.reading is Reading.CONVOLUTION
        )
        if not module or not is_layer:
            why = "it is no linear layer, embedding or convolution" if module else "its module is not known"
            raise ParametersError(
                f"{graph.known_as.shown(weight)!r} cannot be in a PEFT folder, because {why}. Write 'merged' or "
                "'onnx_adapter' in adapter.outputs, or leave the weight out of adapter.targets."
            )
        _refuse_several_modules(graph, weight, paths)
    _check_prefix(graph, settings)
    renamed = [name for name in _trained_in_full(graph) if name in graph.known_as.paths]
    if renamed:
        raise ParametersError(
            f"{graph.known_as.shown(renamed[0])!r}, which adapter.train_too names, cannot be in a PEFT folder: the "
            "export changed it, so that its layout in the original module is not known. Write 'merged' instead."
        )
    for name in _trained_in_full(graph):
        _refuse_several_modules(graph, name, paths)


def _refuse_several_modules(graph: TrainingGraph, weight: str, paths: ModulePaths) -> None:
    """A weight that an embedding and the last layer share: PEFT would change one of the two."""
    names = (weight, *(copy for copy, tie in graph.ties.items() if tie.weight == weight))
    values = [graph.source.graph.initializers[name] for name in names if name in graph.source.graph.initializers]
    nodes = [use.node for value in values for use in value.uses()]
    modules = sorted({module_scope(node) or path_scope(node, paths) for node in nodes} - {""})
    if len(modules) > 1:
        raise ParametersError(
            f"{graph.known_as.shown(weight)!r} cannot be in a PEFT folder, because the modules {' and '.join(modules)} "
            "share it, and PEFT changes each module alone. Write 'merged' or 'onnx_adapter' in adapter.outputs, or "
            "leave the weight out of adapter.targets and adapter.train_too."
        )


def _check_prefix(graph: TrainingGraph, settings: Adapter) -> None:
    known = (graph.known_as.paths.get(name, name) for name in (*graph.adapters, *_trained_in_full(graph)))
    other = next((path for path in known if not path.startswith(settings.module_prefix)), None)
    if other is not None:
        raise ParametersError(
            f"adapter.module_prefix is {settings.module_prefix!r}, but the module path {other!r} does not begin with "
            "it. Set it to what comes before the names that the original module has, or remove it."
        )


def write_peft(graph: TrainingGraph, read: Read, folder: Path, settings: Adapter) -> Path:
    """Writes a folder that PEFT's `from_pretrained` loads onto the original network.

    Raises:
        ParametersError: a weight has no place in it.
        StorageError: it cannot be written.
    """
    from safetensors.numpy import save

    check_peft(graph, settings)
    tensors: dict[str, np.ndarray] = {}
    for weight, adapted in graph.adapters.items():
        keys = peft_keys(adapted, peft_module(weight, graph.known_as, settings.module_prefix))
        a, b = factors(graph, adapted, read)
        tensors[keys[adapted.a]], tensors[keys[adapted.b]] = a.numpy(), b.numpy()
        if adapted.has_magnitude:
            magnitude = read(adapted.magnitude).detach().cpu()
            shape = (1, -1, *(1 for _ in adapted.shape[2:])) if adapted.reading is Reading.CONVOLUTION else (-1,)
            tensors[keys[adapted.magnitude]] = magnitude.reshape(shape).contiguous().numpy()
    full = _trained_in_full(graph)
    prefix = settings.module_prefix
    tensors |= {f"{PREFIX}{n.removeprefix(prefix)}": read(n).detach().cpu().contiguous().numpy() for n in full}
    config = peft_config(graph, settings, [name.removeprefix(prefix).rpartition(".")[0] for name in full])
    with _written_next_to(folder) as place:
        # Its own `save_file` writes files that only their owner may read.
        (place / TENSORS_NAME).write_bytes(save(tensors, metadata={"format": "pt"}))
        (place / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        for name in (TENSORS_NAME, CONFIG_NAME):
            os.replace(place / name, folder / name)
    return folder


def peft_config(graph: TrainingGraph, settings: Adapter, full: list[str]) -> dict[str, Any]:
    """The fields of an `adapter_config.json`; weights whose rank or alpha is their own are listed by module."""
    times = 2 if settings.start == "pissa" else 1
    ranks, alphas = {}, {}
    for weight, adapted in graph.adapters.items():
        module, rank = peft_module(weight, graph.known_as, settings.module_prefix), adapted.rank * times
        ranks[module] = rank
        alphas[module] = _rounded(adapted.scale * (math.sqrt(rank) if settings.rslora else rank))
    # What most have is the default.
    rank = max(ranks.values(), key=list(ranks.values()).count)
    alpha = max(alphas.values(), key=list(alphas.values()).count)
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": all(
            one.reading is Reading.RIGHT and not one.outputs_first and name not in graph.known_as.paths
            for name, one in graph.adapters.items()
        ),
        "init_lora_weights": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "target_modules": sorted(ranks),
        "rank_pattern": {module: found for module, found in ranks.items() if found != rank},
        "alpha_pattern": {module: found for module, found in alphas.items() if found != alpha},
        "modules_to_save": sorted(set(full)) or None,
    }


def _rounded(number: float) -> float | int:
    """Alpha as it was given: what dividing and multiplying by the rank did to it is undone."""
    rounded = round(number)
    return rounded if math.isclose(number, rounded, rel_tol=1e-12) else float(f"{number:.12g}")


def _require_adapters(graph: TrainingGraph, what: str) -> None:
    if not graph.adapters:
        raise ParametersError(
            f"{what} holds adapters, and nothing was trained with any. Set adapter.rank in the RUN.yaml of the run."
        )


@contextlib.contextmanager
def _written_next_to(path: Path) -> Iterator[Path]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(path) as folder:
            yield folder
    except OSError as error:
        raise StorageError(
            f"{str(path)!r} cannot be written: {error.strerror or error}. Choose another path."
        ) from error

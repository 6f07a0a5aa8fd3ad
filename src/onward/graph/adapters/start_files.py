"""Adapters that a run begins with: a PEFT folder, or an adapter file of ONNX Runtime, as tensors of the weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onward.errors import ModelError
from onward.graph.adapters.adapted import LORA_A, LORA_B, AdaptedWeight
from onward.graph.adapters.peft_names import PREFIX, peft_keys, peft_module
from onward.graph.weights.names import WeightNames
from onward.spelling import shortened
from onward.untrusted_files import parse_json, read_text

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class StartFile:
    """Adapters in a file.

    Attributes:
        path: of the file or folder.
        tensors: as the file calls them.
        config: of a PEFT folder; None: an adapter of ONNX Runtime, whose B is scaled already.
        known_as, prefix: by which weights are found (`peft_module`).
    """

    path: Path
    tensors: Mapping[str, np.ndarray]
    config: Mapping[str, Any] | None
    known_as: WeightNames
    prefix: str

    def keys(self, adapted: AdaptedWeight) -> dict[str, str]:
        """Name of each tensor of an adapter -> what the file calls it."""
        if self.config is None:
            names = (adapted.a, adapted.b, *([adapted.factor] if adapted.has_magnitude else []))
            return {name: name for name in names}
        return peft_keys(adapted, peft_module(adapted.weight, self.known_as, self.prefix))

    def holds(self, weight: str) -> bool:
        """Whether the file has an adapter of a weight."""
        if self.config is None:
            return f"{weight}.{LORA_A}" in self.tensors
        module = peft_module(weight, self.known_as, self.prefix)
        ends = ("lora_A.weight", "lora_embedding_A")
        return bool(module) and any(f"{PREFIX}{module}.{end}" in self.tensors for end in ends)

    def values(self, adapted: AdaptedWeight) -> dict[str, np.ndarray]:
        """What the tensors of an adapter begin as.

        Raises:
            ModelError: the file lacks one, or has it of another rank or scale.
        """
        found = {}
        shapes = adapted.shapes | {adapted.factor: adapted.shapes.get(adapted.magnitude, ())}
        for name, key in self.keys(adapted).items():
            if key not in self.tensors:
                raise ModelError(f"adapter.start_path: {self.path} lacks {key!r}, the start of {name!r}.")
            array, shape = self.tensors[key], shapes[name]
            if array.size != math.prod(shape):
                rank = array.shape[0] if name == adapted.a else array.shape[1] if array.ndim > 1 else 0
                raise ModelError(
                    f"adapter.start_path: {key!r} of {self.path} has the shape {list(array.shape)}; expected "
                    f"{list(shape)}. Set adapter.rank to that of the file, which is {rank}, or give another file."
                )
            found[name] = array.reshape(shape)
        self._check_scale(adapted)
        if self.config is None:
            found[adapted.b] = found[adapted.b] / np.float32(adapted.scale)
        return found

    def _check_scale(self, adapted: AdaptedWeight) -> None:
        if self.config is None:
            return
        module = peft_module(adapted.weight, self.known_as, self.prefix)
        alpha = _of_module(self.config.get("alpha_pattern"), module, self.config.get("lora_alpha", adapted.rank))
        root = math.sqrt(adapted.rank) if self.config.get("use_rslora") else adapted.rank
        if not math.isclose(alpha / root, adapted.scale, rel_tol=1e-6):
            raise ModelError(
                f"adapter.start_path: {self.path} scales the adapter of {module!r} by {alpha / root:g} (lora_alpha "
                f"{alpha:g}, use_rslora {str(bool(self.config.get('use_rslora'))).lower()}), this run by "
                f"{adapted.scale:g}. Set adapter.alpha and adapter.rslora as in the file's {CONFIG_NAME}."
            )
        if bool(self.config.get("use_dora")) != adapted.has_magnitude:
            raise ModelError(
                f"adapter.start_path: use_dora is {str(bool(self.config.get('use_dora'))).lower()} in the "
                f"{CONFIG_NAME} of {self.path}; set adapter.dora alike."
            )

    def full_values(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """What stored tensors begin as that were trained in full next to the adapters, as far as the file has them.

        Raises:
            ModelError: one is of another shape.
        """
        keys = {name: self._full_key(name) for name in shapes}
        found = {name: self.tensors[key] for name, key in keys.items() if key in self.tensors}
        for name, array in found.items():
            if array.shape != shapes[name]:
                raise ModelError(
                    f"adapter.start_path: {keys[name]!r} of {self.path} has the shape {list(array.shape)}; expected "
                    f"{list(shapes[name])}. Give the file of an adapter of this model."
                )
        return found

    def _full_key(self, name: str) -> str:
        return name if self.config is None else f"{PREFIX}{name.removeprefix(self.prefix)}"

    def check_all_used(self, names: Mapping[str, AdaptedWeight], full: Collection[str]) -> None:
        """Refuses a file that has adapters of weights which the run does not adapt.

        Args:
            names: the adapted weights.
            full: tensors of `full_values`.

        Raises:
            ModelError: naming them.
        """
        used = {key for adapted in names.values() for key in self.keys(adapted).values()}
        used |= {self._full_key(name) for name in full}
        left = [key for key in self.tensors if key not in used]
        if left:
            raise ModelError(
                f"adapter.start_path: {len(left)} tensors of {self.path} are of no adapted weight: "
                f"{shortened(left, _LISTED)}. Leave adapter.targets out to adapt what the file does, and set "
                "adapter.module_prefix if modules of the ONNX file have something in front of their original names. "
                "Name weights that were trained in full in adapter.train_too."
            )


def _of_module(pattern: Any, module: str, default: float) -> float:
    """PEFT's alpha of a module, by its full name."""
    return float(pattern[module] if isinstance(pattern, Mapping) and module in pattern else default)


def read_start(path: Path, known_as: WeightNames, prefix: str) -> StartFile:
    """Reads a PEFT folder or an `.onnx_adapter`.

    Raises:
        ModelError: it is neither, or damaged.
    """
    config = _peft_config(path) if path.is_dir() else None
    tensors = _peft_tensors(path) if path.is_dir() else _runtime_tensors(path)
    return StartFile(path=path, tensors=tensors, config=config, known_as=known_as, prefix=prefix)


def _peft_config(folder: Path) -> Mapping[str, Any]:
    try:
        config = parse_json(read_text(folder / CONFIG_NAME))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"adapter.start_path: {folder / CONFIG_NAME} cannot be read: {error}. Name a folder that PEFT's "
            "save_pretrained wrote."
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        found = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise ModelError(f"adapter.start_path: {folder / CONFIG_NAME} is of the type {found!r}; expected LORA.")
    return config


def _peft_tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(folder / TENSORS_NAME))
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelError(
            f"adapter.start_path: {folder / TENSORS_NAME} cannot be read: {error}. Name a folder that PEFT's "
            "save_pretrained wrote, with safe_serialization."
        ) from error


def _runtime_tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        from onnxruntime import AdapterFormat
    except ImportError as error:
        raise ModelError(
            "adapter.start_path names an adapter of ONNX Runtime, which reads it, and onnxruntime is not installed: "
            'run pip install "onward[export]".'
        ) from error
    try:
        adapter = AdapterFormat.read_adapter(str(path))
        # Its arrays are views of memory that goes with it.
        tensors = {name: np.array(value.numpy()) for name, value in adapter.get_parameters().items()}
    except Exception as error:  # onnxruntime raises RuntimeError and its own
        raise ModelError(
            f"adapter.start_path: {path} cannot be read: {str(error).strip()}. Name a PEFT folder or an .onnx_adapter "
            "file."
        ) from error
    if not any(name.endswith(f".{LORA_A}") for name in tensors):
        raise ModelError(
            f"adapter.start_path: {path} has the parameters {shortened(tensors, _LISTED)}; expected "
            f"names that end in .{LORA_A} and .{LORA_B}, as onward writes them."
        )
    return tensors

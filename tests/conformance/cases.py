"""The cases of the onnx package's backend tests: a model, inputs, the outputs the standard expects."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

KINDS = ("node", "simple", "light", "real", "pytorch-converted", "pytorch-operator")

_LIGHT = "onnx/backend/test/data/light/"
"""Where the onnx package keeps the models of kind "real" that need no download."""


@dataclass(frozen=True)
class Case:
    """One model with its data sets."""

    kind: str
    name: str
    rtol: float
    atol: float
    model: onnx.ModelProto
    data_sets: tuple[tuple[list[Any], list[Any]], ...]


@functools.cache
def _tests(kind: str) -> tuple[Any, ...]:
    return tuple(load_model_tests(kind=kind))


def load_cases(kind: str, match: str = "") -> Iterator[Case]:
    """All cases of a kind whose name contains `match`; cases that would need a download are left out."""
    for test in _tests(kind):
        if match not in test.name:
            continue
        if test.model is not None:
            model = test.model
            sets = [([_unpack(v) for v in i], [_unpack(v) for v in o]) for i, o in test.data_sets]
        elif test.url is not None and test.url.startswith(_LIGHT):
            model, sets = _read_light(Path(onnx.__file__).parent.parent / test.url)
        else:
            if test.model_dir is None or not Path(test.model_dir, "model.onnx").is_file():
                continue
            model = onnx.load(os.path.join(test.model_dir, "model.onnx"))
            sets = list(_read_sets(Path(test.model_dir), model))
        yield Case(kind, test.name, test.rtol, test.atol, model, tuple(sets))


def _read_light(path: Path) -> tuple[onnx.ModelProto, list[tuple[list[Any], list[Any]]]]:
    """A model whose weights are fills, with the inputs that the standard's runner makes: a ramp from 0 to 1."""
    model = onnx.load(path)
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs: list[Any] = []
    for value in model.graph.input:
        if value.name not in stored:
            shape = tuple(
                axis.dim_value if axis.HasField("dim_value") else 1 for axis in value.type.tensor_type.shape.dim
            )
            count = int(np.prod(shape))
            inputs.append((np.arange(count).reshape(shape) / count).astype(np.float32))
    count = len(model.graph.output)
    files = [path.with_name(f"{path.stem}_output_{index}.pb") for index in range(count)]
    outputs = [_read(file, value.type) for file, value in zip(files, model.graph.output, strict=True)]
    return model, [(inputs, outputs)]


def _unpack(value: Any) -> Any:
    """Some cases hold their tensors as protobuf messages."""
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _read_sets(folder: Path, model: onnx.ModelProto) -> Iterator[tuple[list[Any], list[Any]]]:
    for directory in sorted(folder.glob("test_data_set*")):
        inputs = [_read(p, v.type) for p, v in zip(_numbered(directory, "input"), model.graph.input, strict=False)]
        outputs = [_read(p, v.type) for p, v in zip(_numbered(directory, "output"), model.graph.output, strict=False)]
        yield inputs, outputs
    for file in sorted(folder.glob("test_data_*.npz")):
        data = np.load(file, encoding="bytes")
        yield list(data["inputs"]), list(data["outputs"])


def _numbered(directory: Path, stem: str) -> list[Path]:
    return sorted(directory.glob(f"{stem}_*.pb"), key=lambda p: int(p.stem.rsplit("_", 1)[1]))


def _read(path: Path, value_type: onnx.TypeProto) -> Any:
    data = path.read_bytes()
    kind = value_type.WhichOneof("value")
    if kind == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if kind == "optional_type":
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    return numpy_helper.to_array(onnx.TensorProto.FromString(data))

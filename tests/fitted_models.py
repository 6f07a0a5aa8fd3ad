"""Estimators of scikit-learn, fitted on flowers and converted by skl2onnx with its default options, for tests."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

SAMPLES = 150


@functools.cache
def flowers() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Four features of 150 flowers, their three classes, and a number to predict, [150, 1]."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    x, classes = datasets.load_iris(return_X_y=True)
    x = x.astype(np.float32)
    return x, classes, (2 * x[:, :1] + x[:, 1:2] - 3).astype(np.float32)


def convert(estimator: Any, target: np.ndarray, folder: Path, x: np.ndarray | None = None, **options: Any) -> Path:
    """Fits an estimator and writes it as skl2onnx does by default."""
    converter = pytest.importorskip("skl2onnx", reason="skl2onnx is not installed")
    x = flowers()[0] if x is None else x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # estimators that are stopped early say so
        estimator.fit(x, target)
        model = converter.to_onnx(estimator, x[:1], **options)
    path = folder / "fitted.onnx"
    onnx.save(model, path)
    return path


def run(model: Path | onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, Any]:
    """The outputs by name as onnxruntime computes them; maps as rows of their numbers."""
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(_as_rows, session.run(None, feeds)), strict=True))


def _as_rows(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return np.array([list(one.values()) for one in value], np.float32)
    return value


def nodes_of(model: onnx.ModelProto) -> list[bytes]:
    """Every node as bytes; a domain that is given and empty is none."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _clear_empty_domains(copy.graph)
    return [node.SerializeToString(deterministic=True) for node in copy.graph.node]


def _clear_empty_domains(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if not node.domain:
            node.ClearField("domain")
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _clear_empty_domains(attribute.g)

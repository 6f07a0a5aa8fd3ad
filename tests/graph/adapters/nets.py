"""Nets with adapters, as runs build them, and what ONNX Runtime computes, for tests of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.parameters import Adapter


def adapted(model: onnx.ModelProto, **settings: Any) -> OnnxModule:
    """A net with adapters, as a run builds it."""
    given = {"rank": 2, "alpha": 3.0, "targets": ("w",), **settings}
    return OnnxModule(make_training_graph(model, adapter=Adapter(**given), fuse=True))


def runtime(path: Path, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    result: np.ndarray = onnxruntime.InferenceSession(path, options).run(None, dict(inputs))[0]
    return result


def computed(net: OnnxModule, inputs: Mapping[str, np.ndarray]) -> torch.Tensor:
    result = net(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    return result[0] if isinstance(result, tuple) else result


def move(net: OnnxModule) -> None:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in filter(lambda one: one.requires_grad, net.weights.values()):
            weight.add_(0.3 * torch.randn(weight.shape, generator=random))

"""Models that hand their inputs on as predictions, and the run of such a model with a loss in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossNames, LossSpec

OPSETS = (7, 9, 11, 12, 13, 18, 23)
Shape = Sequence[int | str | None]


def pass_through(
    opset: int, outputs: dict[str, Shape], element_type: int = TensorProto.FLOAT, declare_shapes: bool = True
) -> onnx.ModelProto:
    """A model with inputs `<name>_in` that gives each out again as `<name>`, of declared shape or not."""
    nodes = [helper.make_node("Identity", [f"{name}_in"], [name], name=f"pass_{name}") for name in outputs]
    inputs = [helper.make_tensor_value_info(f"{name}_in", element_type, shape) for name, shape in outputs.items()]
    infos = [
        helper.make_tensor_value_info(name, element_type, shape if declare_shapes else None)
        for name, shape in outputs.items()
    ]
    graph = helper.make_graph(nodes, "pass_through", inputs, infos)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8 if opset < 20 else 10)


def run_loss(
    model: onnx.ModelProto, spec: LossSpec, feeds: dict[str, np.ndarray], folder: Path
) -> tuple[dict[str, np.ndarray], LossNames]:
    """All outputs of the model with its loss, as ONNX Runtime computes them from the file onward writes."""
    path = folder / "with_loss.onnx"
    names = write_model_with_loss(model, spec, path)
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, feeds), strict=True)), names


RELATIVE = 1e-6
RNG = np.random.default_rng(0)


def drawn_logits(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape, scale=2.0).astype(np.float32)


def assert_close(value: np.ndarray, reference: torch.Tensor) -> None:
    assert value.shape == ()
    assert value.dtype == np.float32
    assert value == pytest.approx(float(reference), rel=RELATIVE)


MSE = "mean_squared_error"

"""Models whose weights are stored in 16 bits: fp32 masters train them, and the exported file keeps its type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.data.in_memory import InMemoryDataLoader
from onward.environment import Environment
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.watching import Recorder

STEPS = 30


def write_model(path: Path, element_type: int) -> None:
    """logits = x @ w + b in fp16 or bf16 throughout."""
    generator = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(element_type)
    weight = generator.normal(0, 0.1, (16, 4)).astype(dtype)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["logits"])],
        "half",
        [helper.make_tensor_value_info("x", element_type, ["batch", 16])],
        [helper.make_tensor_value_info("logits", element_type, ["batch", 4])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.zeros(4, dtype), "b")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)


def train(folder: Path, rate: float, element_type: int = TensorProto.FLOAT16) -> tuple[TrainingRunner, Recorder]:
    write_model(folder / "model.onnx", element_type)
    parameters = Parameters.from_mapping(
        {
            "paths": {"model_path": folder / "model.onnx", "output_dir": folder / "out"},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {"batch_size": 8, "num_train_steps": STEPS, "display_loss_steps": 1},
            "learning_rate": {"initial_lr": rate},
            "mixed_precision": {"use_mixed_precision": True, "use_bfloat16": element_type == TensorProto.BFLOAT16},
        }
    )
    generator = np.random.default_rng(1)
    x = generator.normal(0, 1, (8, 16)).astype(helper.tensor_dtype_to_np_dtype(element_type))
    loader = InMemoryDataLoader({"x": x, "labels": np.arange(8) % 4})
    recorder = Recorder()
    runner = TrainingRunner(parameters, Environment(execution_provider="CPU"), [recorder], progress=False)
    runner.initialize()
    runner.run(loader)
    runner.end_training()
    return runner, recorder


def test_updates_too_small_for_fp16_add_up(tmp_path: Path) -> None:
    """30 updates of about 1e-6 on weights of about 0.1: in fp16, whose steps there are 6e-5, nothing would move."""
    runner, recorder = train(tmp_path, 1e-5)
    weight = runner.net.weights["w"]
    assert weight.dtype is torch.float32
    start = numpy_helper.to_array(onnx.load(tmp_path / "model.onnx").graph.initializer[0]).astype(np.float32)
    moved = np.abs(weight.detach().numpy() - start)
    assert 0 < moved.max() < 2e-4
    assert (moved > 0).mean() > 0.9
    assert any("2 weights are 16-bit" in message for message in recorder.messages)


def test_the_exported_model_is_fp16_again_and_has_learnt(tmp_path: Path) -> None:
    _, recorder = train(tmp_path, 0.3)
    assert recorder.losses[-1] < 0.5 * recorder.losses[0]
    path = tmp_path / "out" / "model_trained.onnx"
    assert {tensor.data_type for tensor in onnx.load(path).graph.initializer} == {TensorProto.FLOAT16}
    session = onnxruntime.InferenceSession(path)
    x = np.random.default_rng(1).normal(0, 1, (8, 16)).astype(np.float16)
    (logits,) = session.run(None, {"x": x})
    assert (logits.argmax(1) == np.arange(8) % 4).mean() > 0.7


@pytest.mark.filterwarnings("ignore")
def test_bfloat16_models_learn_too(tmp_path: Path) -> None:
    runner, recorder = train(tmp_path, 0.3, TensorProto.BFLOAT16)
    assert runner.net.weights["w"].dtype is torch.float32
    assert recorder.losses[-1] < 0.5 * recorder.losses[0]
    exported = onnx.load(tmp_path / "out" / "model_trained.onnx")
    assert {tensor.data_type for tensor in exported.graph.initializer} == {TensorProto.BFLOAT16}

"""Batch normalization that keeps its running statistics in training: values and gradients of inference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

import onward
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.parameters import Parameters
from tests.initializers import stored_arrays
from tests.mlp import CROSS_ENTROPY, build_mlp, data

STATISTICS = ("running_mean", "running_var")


def normalized_model(training_mode: bool = False) -> onnx.ModelProto:
    """An MLP with statistics that no batch of the data has; exported for inference or in training mode."""
    model = build_mlp(normalized=True)
    for tensor in model.graph.initializer:
        if tensor.name in STATISTICS:
            size = tensor.dims[0]
            tensor.CopyFrom(numpy_helper.from_array(np.linspace(1, 3, size).astype(np.float32), tensor.name))
    (norm,) = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    if training_mode:
        norm.attribute.append(onnx.helper.make_attribute("training_mode", 1))
        norm.output.extend(["next_mean", "next_var"])
    return model


@pytest.mark.parametrize("training_mode", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_training_computes_what_inference_does(training_mode: bool, fuse: bool) -> None:
    net = OnnxModule(make_training_graph(normalized_model(training_mode), freeze_batch_norm=True, fuse=fuse)).train()
    assert net.graph.states == ()
    assert all(net.graph.frozen[name].startswith("running statistic, frozen") for name in STATISTICS)
    reference = onward.to_torch(normalized_model(), fuse=fuse)
    x = torch.from_numpy(data(8)["x"])
    expected, actual = reference(x), net(x)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    expected.square().sum().backward()
    actual.square().sum().backward()
    assert sorted(net.weights) == sorted(reference.weights)
    for name, weight in net.weights.items():
        torch.testing.assert_close(weight.grad, reference.weights[name].grad, rtol=1e-5, atol=1e-5)


def test_a_run_leaves_the_statistics_and_its_checkpoint_exports(tmp_path: Path) -> None:
    onnx.save(normalized_model(), tmp_path / "mlp.onnx")
    given = {
        "paths": {"model_path": str(tmp_path / "mlp.onnx"), "output_dir": str(tmp_path)},
        "loss": CROSS_ENTROPY,
        "training": {"batch_size": 2, "num_train_steps": 20, "freeze_batch_norm": True},
        "learning_rate": {"initial_lr": 0.01},
        "optimizer": {"training_optimizer_name": "Adam"},
        "checkpoint": {"checkpoints_dir": str(tmp_path / "checkpoints"), "checkpoint_period": 20},
    }
    loader = InMemoryDataLoader(data(32))
    runner = onward.TrainingRunner(Parameters.from_mapping(given), onward.Environment())
    runner.initialize()
    before = runner.evaluate(loader).metrics["loss"]
    runner.run(loader)
    assert runner.evaluate(loader).metrics["loss"] < before
    runner.end_training()
    first, trained = stored_arrays(normalized_model()), stored_arrays(tmp_path / "mlp_trained.onnx")
    assert all(np.array_equal(first[name], trained[name]) for name in STATISTICS)
    assert not np.array_equal(first["w1"], trained["w1"])
    from onward.artifacts.trained_model import export_checkpoint

    export_checkpoint([tmp_path / "mlp.onnx"], tmp_path / "checkpoints", tmp_path / "again.onnx")
    again = stored_arrays(tmp_path / "again.onnx")
    assert all(np.array_equal(again[name], trained[name]) for name in trained)


def test_a_model_without_statistics_is_refused() -> None:
    words = r"^training\.freeze_batch_norm is set, but the model has no batch normalization .* Remove the field\.$"
    with pytest.raises(ModelError, match=words):
        make_training_graph(build_mlp(), freeze_batch_norm=True)

"""An fp16 model on a device: fp32 master weights, as `onward train` has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onward.data.in_memory import InMemoryDataLoader
from onward_device import Trainer
from tests.device.bundles import batches, bundle_of, sections
from tests.mlp import build_mlp, data, start


def test_an_fp16_model_is_trained_in_fp32(tmp_path: Path) -> None:
    """Both round to fp16, in different orders; weights that are 16 bits themselves would stand still."""
    model = build_mlp()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    onnx.save(helper.make_model(model.graph, opset_imports=model.opset_import, ir_version=8), tmp_path / "mlp.onnx")
    features = {name: array for name, array in data(200).items() if name in ("x", "label")}
    features["x"] = features["x"].astype(np.float16)
    changes = {"learning_rate": {"initial_lr": 1e-3}, "training": {"mapped_dimensions": {"batch": 4}}}
    runner, recorder = start(tmp_path, **sections(**changes))
    runner.run(InMemoryDataLoader(dict(features)))
    trainer = Trainer.load(bundle_of(tmp_path, **changes))
    losses = [trainer.train_step(batch) for batch in batches(features)]
    assert losses == pytest.approx(recorder.losses, rel=5e-3)
    assert trainer.state()["w1"].dtype == np.float32
    assert np.abs(trainer.state()["w1"] - runner.net.weights["w1"].detach().float().numpy()).max() < 1e-3
    trainer.export(tmp_path / "trained.onnx")
    metrics = trainer.evaluate(batches(features))
    assert 0 < metrics["loss"] < np.mean(losses)

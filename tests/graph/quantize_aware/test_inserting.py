"""Where quantizers are put, and what is refused: opsets, models without weights, files that are quantized."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError
from onward.graph.quantize_aware.inserting import quantize_aware_model
from onward.parameters import QuantizeAware
from onward.parameters.limits import DEFAULT_LIMITS
from tests.graph.quantize_aware.networks import INT8, build_image_net, trained
from tests.mlp import build_mlp, data, save_mlp, start


def test_what_onnxruntime_has_no_kernels_for_is_reported(tmp_path: Path) -> None:
    onnx.save(build_image_net(), tmp_path / "mlp.onnx")
    _, recorder = start(tmp_path, quantize_aware={"weights": "int4"})
    words = (
        "quantize_aware.weights is int4 and quantize_aware.activations is uint8: ONNX Runtime has no integer kernels"
    )
    assert any(words in message for message in recorder.messages)


def test_an_opset_that_is_too_old(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"quantize_aware\.weights is int4 with per_channel true, which needs opset 21; the"
    ):
        start(tmp_path, quantize_aware={"weights": "int4"})


def test_a_model_without_weights_to_quantize(tmp_path: Path) -> None:
    model = build_mlp()
    for node in model.graph.node:
        node.op_type = "Relu" if node.op_type == "Gemm" else node.op_type
        del node.input[1:]
    onnx.save(model, tmp_path / "mlp.onnx")
    with pytest.raises(ModelError, match=r"no Conv, Gemm or MatMul with a float32 weight\. Remove it"):
        start(tmp_path, quantize_aware=INT8)


def test_a_quantized_file_cannot_be_observed(tmp_path: Path) -> None:
    trained(tmp_path, build_image_net(), INT8, 1)
    (tmp_path / "out" / "mlp_trained.onnx").rename(tmp_path / "mlp.onnx")
    with pytest.raises(ModelError, match="but the model is quantized already, with scales and zero points of its own"):
        start(tmp_path, quantize_aware={**INT8, "observer": "moving_average"})


def test_a_quantized_file_stays_as_it_is_without_the_section(tmp_path: Path) -> None:
    """Float weights, float biases and the nodes that round them are the user's own."""
    save_mlp(tmp_path)
    model = quantize_aware_model(tmp_path / "mlp.onnx", QuantizeAware(weights="int8"), DEFAULT_LIMITS)
    assert isinstance(model, ir.Model)
    for name in ("x_scale", "active_scale"):
        model.graph.initializers[name].const_value = ir.Tensor(np.float32(0.05), name=name)
    ir.save(model, tmp_path / "mlp.onnx")
    runner, _ = start(tmp_path, paths={"output_dir": tmp_path / "out"})
    runner.run(InMemoryDataLoader(data(32)))
    runner.end_training()
    files = [onnx.load(path).graph for path in (tmp_path / "mlp.onnx", tmp_path / "out" / "mlp_trained.onnx")]
    assert list(files[0].node) == list(files[1].node)
    assert sorted(one.name for one in files[0].initializer) == sorted(one.name for one in files[1].initializer)

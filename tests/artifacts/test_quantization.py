"""Models in lower precision run in ONNX Runtime and stay close to the trained one, within bounds of the number of
bits."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from onward.artifacts.quantization import Calibration, optimize_model, quantize_model
from onward.artifacts.trained_model import export_checkpoint
from onward.data.shard_writer import ShardWriter
from onward.errors import DataError, ModelError, ParametersError
from tests.artifacts.trained_run import convolutional_model, samples, train, write_shard


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(folder)
    write_shard(folder / "calibration" / "0.pb")
    write_shard(folder / "renamed" / "0.pb", name="picture")
    (folder / "empty").mkdir()
    return folder


def scores(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"image": samples(24)["image"]})
    return np.asarray(found)


# Of the largest score: half a step of 10 mantissa bits a layer; a few steps of 1/127 for 8-bit weights and activations.
BOUNDS = {"fp16": 2e-3, "int8-dynamic": 3e-2, "int8-static": 5e-2}
OPERATORS = {"fp16": {"Cast"}, "int8-dynamic": {"MatMulInteger"}, "int8-static": {"QuantizeLinear", "DequantizeLinear"}}


@pytest.mark.parametrize("kind", BOUNDS)
def test_close_to_the_trained_model(run: Path, tmp_path: Path, kind: str) -> None:
    path = export_checkpoint(
        run / "model.onnx",
        run / "checkpoints",
        tmp_path / "small.onnx",
        quantize=kind,
        calibration_dir=run / "calibration" if kind == "int8-static" else None,
    )
    expected, actual = scores(run / "out" / "model_trained.onnx"), scores(path)
    assert actual.dtype == np.float32
    assert np.abs(actual - expected).max() <= BOUNDS[kind] * np.abs(expected).max()
    assert np.abs(actual - expected).max() > 0, "something must have been rounded"
    model = onnx.load(path)
    assert OPERATORS[kind] <= {node.op_type for node in model.graph.node}
    assert path.stat().st_size < 0.9 * (run / "out" / "model_trained.onnx").stat().st_size + 4000
    assert [p.name for p in tmp_path.iterdir()] == ["small.onnx"]


@pytest.mark.parametrize("kind", ["int8-dynamic", "int8-static"])
def test_a_transposed_weight_whose_shape_stands_in_the_file_twice(tmp_path: Path, kind: str) -> None:
    """As torch's exporter writes a linear layer; onnxruntime's quantizer alone refuses it."""
    values = np.random.default_rng(0)
    weight = numpy_helper.from_array(values.standard_normal((10, 64)).astype(np.float32), "weight")
    image, result, listed = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("image", ["batch", 64]), ("scores", ["batch", 10]), ("weight", [10, 64]))
    )
    node = onnx.helper.make_node("Gemm", ["image", "weight"], ["scores"], transB=1)
    graph = onnx.helper.make_graph([node], "linear", [image], [result], [weight], value_info=[listed])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "linear.onnx")
    rows = values.standard_normal((24, 64)).astype(np.float32)
    (tmp_path / "data").mkdir()
    with ShardWriter(tmp_path / "data" / "0.pb") as shard:
        for row in rows:
            shard.write({"image": row})
    calibration = Calibration(tmp_path / "data", {}, 8, 3)
    path = quantize_model(tmp_path / "linear.onnx", tmp_path / "q.onnx", kind, calibration)
    (found,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"image": rows})
    expected = rows @ numpy_helper.to_array(weight).T
    assert 0 < np.abs(found - expected).max() <= BOUNDS[kind] * np.abs(expected).max()


def test_calibration_reads_features_under_the_names_of_the_run(run: Path, tmp_path: Path) -> None:
    calibration = Calibration(run / "renamed", {"picture": "image"}, 8, 4)
    path = quantize_model(run / "out" / "model_trained.onnx", tmp_path / "q.onnx", "int8-static", calibration)
    expected = scores(run / "out" / "model_trained.onnx")
    assert np.abs(scores(path) - expected).max() <= BOUNDS["int8-static"] * np.abs(expected).max()


def test_calibration_data_that_do_not_fit(run: Path, tmp_path: Path) -> None:
    source = run / "out" / "model_trained.onnx"
    with pytest.raises(DataError, match="the calibration data lack image; they hold picture"):
        quantize_model(source, tmp_path / "q.onnx", "int8-static", Calibration(run / "renamed", {}, 8, 2))
    with pytest.raises(DataError, match="empty"):
        quantize_model(source, tmp_path / "q.onnx", "int8-static", Calibration(run / "empty", {}, 8, 2))


@pytest.mark.parametrize("kind", BOUNDS)
def test_without_onnxruntime(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ParametersError, match=r"--quantize needs onnxruntime; install it with: pip install 'onward"):
        quantize_model(run / "model.onnx", tmp_path / "q.onnx", kind)


def test_a_model_that_the_tools_cannot_take(tmp_path: Path) -> None:
    model = convolutional_model()
    model.graph.node[0].op_type = "Convolution"
    onnx.save(model, tmp_path / "broken.onnx")
    with pytest.raises(ModelError, match="onnxruntime could not quantize the model to int8-dynamic: "):
        quantize_model(tmp_path / "broken.onnx", tmp_path / "q.onnx", "int8-dynamic")


def test_the_optimizer_takes_external_data(tmp_path: Path) -> None:
    onnx.save(
        convolutional_model(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    (tmp_path / "out").mkdir()
    path = optimize_model(tmp_path / "m.onnx", tmp_path / "out" / "small.onnx")
    np.testing.assert_allclose(scores(path), scores(tmp_path / "m.onnx"), rtol=1e-5, atol=1e-5)


def test_a_model_that_the_optimizer_cannot_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: object) -> None:
        raise TypeError("no such thing.")

    monkeypatch.setattr("onward.artifacts.simplification.simplify", refuse)
    onnx.save(convolutional_model(), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"could not optimize the model: no such thing\. Export it without --optimize"):
        optimize_model(tmp_path / "m.onnx", tmp_path / "small.onnx")
    assert not (tmp_path / "small.onnx").exists()

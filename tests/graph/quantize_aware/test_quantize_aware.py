"""Quantization-aware training: gradients of LSQ, averages of torch.ao, and files that ONNX Runtime runs on integers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from torch import nn

from onward.artifacts.trained_model import export_checkpoint
from onward.data.in_memory import InMemoryDataLoader
from onward.lowering.module import OnnxModule
from onward.runner import TrainingRunner
from tests.graph.quantize_aware.networks import (
    INT8,
    SLOW_SCALES,
    Mobile,
    Transformer,
    build_image_net,
    exported,
    pictures,
    trained,
)
from tests.initializers import stored_arrays
from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, Result, tensor_difference, train
from tests.invariants.rank_pool import end_ranks
from tests.mlp import ON_ONE_THREAD, assert_same_bits, data, parameters, save_mlp, start, state_bits
from tests.parameters.test_checks import refusal
from tests.watching import Recorder


def run_integers(path: Path, x: np.ndarray, optimized: bool = True) -> tuple[np.ndarray, list[str]]:
    """What ONNX Runtime computes, and by which operators."""
    options, rewritten = onnxruntime.SessionOptions(), path.with_name("optimized.onnx")
    options.optimized_model_filepath, options.log_severity_level = str(rewritten), 3
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (scores,) = onnxruntime.InferenceSession(path, options).run(None, {"x": x})
    return scores, [node.op_type for node in onnx.load(rewritten).graph.node]


def training_scores(runner: TrainingRunner, x: np.ndarray) -> np.ndarray:
    net = OnnxModule(runner.graph, ("logits",)).eval()
    own = net.tensors_by_name()
    with torch.no_grad():
        for name, tensor in runner.net.tensors_by_name().items():
            own[name].copy_(tensor)
        found = net(x=torch.from_numpy(x), label=torch.zeros(len(x), dtype=torch.int64))
    return np.asarray(found)


@pytest.mark.parametrize(
    "asked", [INT8, {**INT8, "per_channel": False}, {**INT8, "observer": "moving_average"}], ids=str
)
def test_onnxruntime_runs_the_exported_file_on_integers(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Convolutions, Relu and pool, Gemm and MatMul; outputs equal those of training to one quantization step."""
    runner = trained(tmp_path, build_image_net(), asked)
    path, x = tmp_path / "out" / "mlp_trained.onnx", pictures(64)["x"]
    scores, operators = run_integers(path, x)
    assert [one for one in operators if one.startswith(("Q", "MatMul"))] == [
        "QuantizeLinear", "QLinearConv", "QLinearConv", "QGemm", "MatMulIntegerToFloat"
    ]  # fmt: skip
    assert not {"Conv", "Gemm", "MatMul", "Relu"} & set(operators)
    expected = training_scores(runner, x)
    weights = stored_arrays(path)
    step = float(weights["r3_scale"]) * float(
        (np.abs(weights["m_quantized"].astype(np.float32)) * weights["m_scale"]).max()
    )
    differs = np.abs(scores - expected)
    assert np.median(differs) < 1e-6  # elsewhere a number between two steps of an earlier layer went the other way
    assert differs.max() < 4 * step
    assert {weights[f"{name}_quantized"].dtype.name for name in ("c1", "c2", "g", "m")} == {"int8"}
    assert not {"c1", "c2", "g", "m"} & weights.keys()
    assert weights["p1_scale" if "p1_scale" in weights else "r1_scale"] > 0
    assert scores.std() > 10 * step


@pytest.mark.parametrize(
    ("module", "dynamo", "observer"),
    [
        (Mobile, False, "lsq"), (Transformer, False, "moving_average"),
        pytest.param(Mobile, True, "moving_average", marks=pytest.mark.slow),
        pytest.param(Transformer, True, "lsq", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_exporters_write_runs_on_integers(
    tmp_path: Path, module: type[nn.Module], dynamo: bool, observer: str
) -> None:
    """Every layer with a weight, skips and depthwise convolutions included."""
    model = onnx.load(exported(module(), tmp_path / "exported.onnx", dynamo))
    model.graph.name = "images"
    runner = trained(tmp_path, model, {**INT8, "observer": observer}, learning_rate={"initial_lr": 0.01})
    path, x = tmp_path / "out" / "mlp_trained.onnx", pictures(64)["x"]
    scores, operators = run_integers(path, x)
    assert not {"Conv", "FusedConv", "Gemm", "Clip", "BatchNormalization"} & set(operators)
    assert operators.count("QLinearConv") == (4 if module is Mobile else 0)
    assert operators.count("MatMulIntegerToFloat") == (0 if module is Mobile else 4)
    differs = np.abs(scores - training_scores(runner, x))
    assert np.median(differs) < 1e-5  # elsewhere a number between two steps of an earlier layer went the other way
    assert differs.max() < 0.03 * scores.std()
    if module is Mobile:
        stored = stored_arrays(path)
        caps = [float(stored[node.input[1]]) for node in onnx.load(path).graph.node
                if node.op_type == "QuantizeLinear" and stored[node.input[2]] == 0]  # fmt: skip
        assert len(caps) >= 3
        assert max(caps) <= np.float32(6 / 255)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_alone(tmp_path: Path, weights: str) -> None:
    runner = trained(tmp_path, build_image_net(), {"weights": weights, "activations": "none"})
    path, x = tmp_path / "out" / "mlp_trained.onnx", pictures(16)["x"]
    assert "MatMulNBits" in run_integers(path, x)[1]
    scores, _ = run_integers(path, x, optimized=False)  # MatMulNBits would quantize the activations, too
    np.testing.assert_allclose(scores, training_scores(runner, x), rtol=1e-4, atol=1e-5)
    stored = {one.name: one.data_type for one in onnx.load(path).graph.initializer}
    assert stored["c2_quantized"] == (TensorProto.INT8 if weights == "int8" else TensorProto.INT4)
    assert path.stat().st_size < (tmp_path / "mlp.onnx").stat().st_size


def test_a_quantized_file_continues_with_its_scales(tmp_path: Path) -> None:
    """What one run exported is what the next one starts with."""
    first = trained(tmp_path, build_image_net(), INT8)
    again = tmp_path / "again"
    again.mkdir()
    exported = onnx.load(tmp_path / "out" / "mlp_trained.onnx")
    onnx.save(exported, again / "mlp.onnx")
    second, _ = start(again, quantize_aware=INT8, paths={"output_dir": again / "out"}, optimizer=SLOW_SCALES)
    x = pictures(16)["x"]
    before = training_scores(second, x)
    np.testing.assert_allclose(before, training_scores(first, x), atol=0.03)
    assert sum(name.endswith("_scale") for name in second.graph.weights) >= 7
    report = second.run(InMemoryDataLoader(pictures(64)))
    assert report.last_loss is not None
    second.end_training()
    scores, operators = run_integers(again / "out" / "mlp_trained.onnx", x)
    assert "QLinearConv" in operators
    np.testing.assert_allclose(scores, training_scores(second, x), atol=0.05)
    assert np.abs(scores - before).max() > 0.05


def test_a_resumed_run_has_the_same_bits_and_its_checkpoint_the_same_file(tmp_path: Path) -> None:
    def run(steps: int, folder: str) -> TrainingRunner:
        recorder = Recorder()
        asked = parameters(
            tmp_path, quantize_aware=INT8, optimizer=SLOW_SCALES, training={"num_train_steps": steps},
            checkpoint={"checkpoints_dir": tmp_path / folder}, paths={"output_dir": tmp_path / "out"},
            learning_rate={"warmup_mode": "none"},
        )  # fmt: skip
        runner = TrainingRunner(asked, ON_ONE_THREAD, [recorder], progress=False)
        runner.initialize()
        if runner.round == 0:
            runner.run(InMemoryDataLoader(data(32)))
        return runner

    save_mlp(tmp_path)
    whole = run(8, "at once")
    run(3, "in two")
    resumed = run(8, "in two")
    assert_same_bits(state_bits(resumed), state_bits(whole))
    resumed.end_training()
    export_checkpoint(tmp_path / "mlp.onnx", tmp_path / "in two", tmp_path / "again.onnx")
    files = [onnx.load(path) for path in (tmp_path / "out" / "mlp_trained.onnx", tmp_path / "again.onnx")]
    assert files[0].graph == files[1].graph


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def spread(layout: Layout, observer: str) -> Result:
    sections = {
        "quantize_aware": {**INT8, "observer": observer},
        "optimizer": {"optimizer_attributes": [{"epsilon": 1e-3}, *SLOW_SCALES["optimizer_attributes"]]},
    }
    if layout.data > 1:
        sections["distributed"] = {**layout.sections()["distributed"], "synchronize_batch_norm": True}
    return train(CASES["mlp"], layout, accumulation=2, updates=4, sections=sections)


@pytest.fixture(scope="module")
def one_process() -> dict[str, Result]:
    return {observer: spread(Layout(), observer) for observer in ("lsq", "moving_average")}


SPREAD = [(Layout(2, 1, 1), "lsq"), (Layout(1, 2, 1), "lsq"), (Layout(1, 1, 2), "lsq"),
          (Layout(2, 1, 1), "moving_average"), (Layout(1, 2, 1), "moving_average"),
          (Layout(1, 1, 2), "moving_average")]  # fmt: skip


@pytest.mark.parametrize(("spread_over", "observer"), SPREAD, ids=str)
def test_every_layout_follows_one_process(spread_over: Layout, observer: str, one_process: dict[str, Result]) -> None:
    actual, expected = spread(spread_over, observer), one_process[observer]
    assert any(name.endswith("_scale") for name in expected.tensors)
    assert tensor_difference(actual, expected, ("weights/", "states/")) < 1e-5
    assert actual.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"weights": "int2"}, "quantize_aware.weights is 'int2'; expected 'int8' or 'int4'"),
        ({"weights": "int8", "activations": "int4"}, "quantize_aware.activations is 'int4'"),
        ({"weights": "int8", "observer": "minmax"}, "quantize_aware.observer is 'minmax'"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], words: str) -> None:
    assert words in refusal(quantize_aware=asked)


def test_adapters_do_not_go_with_rounded_weights() -> None:
    words = "quantize_aware.weights is int8 and adapter.rank is 4; set one of the two"
    assert words in refusal(quantize_aware=INT8, adapter={"rank": 4})

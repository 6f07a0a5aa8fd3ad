"""Models that give or take one number a sample, [N, 1] or [N], trained on every layout of such data: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from onward.commands.training import train
from onward.data.in_memory import InMemoryDataLoader
from onward.data.loader import DataLoader
from onward.data.packing.command import add_arguments
from onward.data.packing.command import run as pack
from onward.errors import DataError
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.mlp import ON_ONE_THREAD, weights_of, write_shards
from tests.ranks import run_on_ranks

ROWS, FEATURES = 24, 3
LAYOUTS: dict[str, tuple[int, ...]] = {"[N]": (), "[N, 1]": (1,), "[N, 1, 1]": (1, 1)}
SQUARES: dict[str, Any] = {"type": "mean_squared_error"}
ENTROPY: dict[str, Any] = {"type": "binary_cross_entropy", "from_logits": True}


def save_model(path: Path, output: tuple[int, ...], given: tuple[int, ...]) -> Path:
    """`x [n, 3]` and one more number `t` a sample -> one number a sample, shaped as the tests want it."""
    draw = np.random.default_rng(3).standard_normal
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
            helper.make_node("Relu", ["h"], ["a"]),
            helper.make_node("Gemm", ["a", "w2", "b2"], ["o"]),
            helper.make_node("Reshape", ["t", "column"], ["tc"]),
            helper.make_node("Add", ["o", "tc"], ["p"]),
            helper.make_node("Reshape", ["p", "like"], ["y"]),
        ],
        "one_number",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", FEATURES]),
            helper.make_tensor_value_info("t", TensorProto.FLOAT, ["n", *given]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", *output])],
        [
            numpy_helper.from_array((draw((FEATURES, 4)) * 0.5).astype(np.float32), "w1"),
            numpy_helper.from_array(np.zeros(4, np.float32), "b1"),
            numpy_helper.from_array((draw((4, 1)) * 0.5).astype(np.float32), "w2"),
            numpy_helper.from_array(np.zeros(1, np.float32), "b2"),
            numpy_helper.from_array(np.array([-1, 1]), "column"),
            numpy_helper.from_array(np.array([-1, *output]), "like"),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def features(label: tuple[int, ...], given: tuple[int, ...]) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((ROWS, FEATURES)).astype(np.float32)
    y = (x.sum(1) > 0).astype(np.float32)
    return {"x": x, "t": (x[:, 0] * 0.1).reshape(-1, *given), "y_true": y.reshape(-1, *label)}


def parameters(path: Path, loss: dict[str, Any], **paths: Any) -> Parameters:
    return Parameters.from_mapping(
        {
            "paths": {"model_path": path, **paths},
            "loss": {**loss, "prediction": "y", "label": "y_true"},
            "training": {"batch_size": 4, "num_train_steps": 12, "display_loss_steps": 1},
            "learning_rate": {"initial_lr": 0.1},
        }
    )


def trained(path: Path, loss: dict[str, Any], source: Any) -> tuple[dict[str, torch.Tensor], float]:
    """The weights after a run, and the loss over the same samples."""
    runner = TrainingRunner(parameters(path, loss), ON_ONE_THREAD)
    runner.initialize(source.feature_specs())
    runner.run(source)
    return weights_of(runner), runner.evaluate(source).metrics["loss"]


@pytest.mark.parametrize(
    ("output", "loss"), [("[N]", SQUARES), ("[N, 1]", SQUARES), ("[N, 1]", ENTROPY), ("[N, 1, 1]", SQUARES)]
)
def test_every_layout_of_one_number_a_sample_trains_alike(output: str, loss: dict[str, Any], tmp_path: Path) -> None:
    """Labels and inputs, in memory and in shards, in training and in evaluation."""
    found, layouts = [], list(LAYOUTS.values())
    for number, given in enumerate(layouts):
        path = save_model(tmp_path / "model.onnx", LAYOUTS[output], given)
        label, stored = (layouts[(number + further) % 3] for further in (1, 2))
        found.append(trained(path, loss, InMemoryDataLoader(features(label, stored))))
        folder = write_shards(tmp_path / f"shards{number}", features(label, stored), files=1)
        found.append(trained(path, loss, DataLoader({}, folder)))
    weights, after = found[0]
    assert after < trained_not_at_all(path, loss)
    for other, value in found[1:]:
        assert value == after
        assert all(torch.equal(other[name], tensor) for name, tensor in weights.items())


def trained_not_at_all(path: Path, loss: dict[str, Any]) -> float:
    runner = TrainingRunner(parameters(path, loss), ON_ONE_THREAD)
    runner.initialize()
    return runner.evaluate(InMemoryDataLoader(features((1,), (1,)))).metrics["loss"]


def test_what_is_packed_from_arrays_trains_and_calibrates(tmp_path: Path) -> None:
    """Packing stores one number a sample without an axis; `onward train` and a static quantization read it."""
    import argparse

    from onward.artifacts.quantization import Calibration, quantize_model

    np.savez(tmp_path / "data.npz", **features((1,), (1,)))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    pack(parser.parse_args([str(tmp_path / "data.npz"), str(tmp_path / "train")]))
    save_model(tmp_path / "model.onnx", (1,), (1,))
    (tmp_path / "run.yaml").write_text(
        "paths: {model_path: model.onnx, train_data_dir: train, test_data_dir: train, output_dir: out}\n"
        "loss: {type: binary_cross_entropy, from_logits: true, prediction: y, label: y_true}\n"
        "training: {batch_size: 4, num_train_steps: 6}\nlearning_rate: {initial_lr: 0.1}\n"
    )
    train(tmp_path / "run.yaml")
    written, quantized = tmp_path / "out" / "model_trained.onnx", tmp_path / "quantized.onnx"
    quantize_model(written, quantized, "int8-static", Calibration(tmp_path / "train", {}, 4, 2))
    feeds = {name: array for name, array in features((1,), (1,)).items() if name != "y_true"}
    assert onnxruntime.InferenceSession(quantized).run(None, feeds)[0].shape == (ROWS, 1)


def two_stages(path: Path, loss: dict[str, Any], label: tuple[int, ...]) -> dict[str, torch.Tensor]:
    split = {"pipeline_parallel_size": 2, "pipeline_partition_cut_list": "a"}
    asked = parameters(path, loss)
    sections = {**asked.to_mapping(), "distributed": split, "speed": {"compile": False}}
    sections["training"]["gradient_accumulation_steps"] = 2
    runner = TrainingRunner(Parameters.from_mapping(sections), ON_ONE_THREAD)
    source = InMemoryDataLoader(features(label, label))
    runner.initialize(source.feature_specs())
    runner.run(source)
    runner.evaluate(source)
    return {name: sharded.tensor.detach().clone() for name, sharded in runner.state.sharded_tensors().items()}


def test_a_pipeline_reads_every_layout(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model.onnx", (1,), (1,))
    plain, columns = (run_on_ranks(2, two_stages, path, SQUARES, label) for label in ((), (1,)))
    for one, other in zip(plain, columns, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_what_is_not_one_number_is_refused_in_words(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model.onnx", (1,), (1,))
    runner = TrainingRunner(parameters(path, SQUARES), ON_ONE_THREAD)
    runner.initialize()
    for label in ((2,), (1, 2)):
        wrong = {**features((), ()), "y_true": np.zeros((ROWS, *label), np.float32)}
        with pytest.raises(DataError) as caught:
            runner.run(InMemoryDataLoader(wrong))
        assert str(caught.value) == (
            f"feature 'y_true' has shape {list(label)} per sample; the loss expects [1]. Only axes of size 1 "
            "are added or removed, where there is one way to do it. Reshape the arrays or pack the data again with "
            "that shape, or name the right feature in data.input_name_map."
        )

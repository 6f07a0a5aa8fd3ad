"""A finished training run of a small model in a folder, for tests of what is made of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.data.in_memory import InMemoryDataLoader
from onward.data.shard_writer import ShardWriter
from onward.environment import Environment
from onward.parameters import Parameters
from onward.runner import TrainingRunner

CLASSES = 5


def convolutional_model(batch_norm: bool = True) -> onnx.ModelProto:
    """Convolution, batch normalization, dropout and a linear layer, over images of 1 x 8 x 8."""
    random = np.random.default_rng(0)
    weights = {
        "conv.weight": 0.4 * random.standard_normal((4, 1, 3, 3)),
        "norm.weight": np.ones(4) + 0.1 * random.random(4),
        "norm.bias": 0.1 * random.random(4),
        "norm.mean": np.zeros(4),
        "norm.var": np.ones(4),
        "fc.weight": 0.1 * random.standard_normal((144, CLASSES)),
        "fc.bias": 0.1 * random.random(CLASSES),
    }
    nodes = [
        helper.make_node("Conv", ["image", "conv.weight"], ["c"], name="conv"),
        helper.make_node("BatchNormalization", ["c", *list(weights)[1:5]], ["n"], name="norm"),
        helper.make_node("Relu", ["n" if batch_norm else "c"], ["r"], name="relu"),
        helper.make_node("Dropout", ["r"], ["d"], name="drop"),
        helper.make_node("Shape", ["d"], ["shape"], name="shape"),
        helper.make_node("Gather", ["shape", "zero"], ["batch_size"], name="batch_size"),
        helper.make_node("Concat", ["batch_size", "rest"], ["sizes"], axis=0, name="sizes"),
        helper.make_node("Reshape", ["d", "sizes"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "fc.weight", "fc.bias"], ["scores"], name="fc"),
    ]
    if not batch_norm:
        del nodes[1]
        weights = {name: value for name, value in weights.items() if not name.startswith("norm")}
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
        [
            *(numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()),
            numpy_helper.from_array(np.array([0]), "zero"),
            numpy_helper.from_array(np.array([-1]), "rest"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def samples(count: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        "image": random.random((count, 1, 8, 8), dtype=np.float32),
        "labels": random.integers(0, CLASSES, count),
    }


def write_shard(path: Path, count: int = 32, name: str = "image") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with ShardWriter(path) as writer:
        for image in samples(count)["image"]:
            writer.write({name: image})


def train(folder: Path, **training: object) -> TrainingRunner:
    """Writes `model.onnx`, checkpoints and `out/model_trained.onnx` into the folder."""
    onnx.save(convolutional_model(), folder / "model.onnx")
    parameters = Parameters.from_mapping(
        {
            "paths": {"model_path": folder / "model.onnx", "output_dir": folder / "out"},
            "loss": {"type": "softmax_cross_entropy", "prediction": "scores", "label": "labels"},
            "training": {"batch_size": 8, "num_train_steps": 12, **training},
            "learning_rate": {"initial_lr": 0.01},
            "optimizer": {"training_optimizer_name": "Adam"},
            "checkpoint": {"checkpoints_dir": folder / "checkpoints"},
        }
    )
    runner = TrainingRunner(parameters, Environment(execution_provider="CPU"), progress=False)
    runner.initialize()
    runner.run(InMemoryDataLoader(samples(32)))
    runner.end_training()
    return runner

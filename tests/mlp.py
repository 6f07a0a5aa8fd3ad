"""A network of two layers, its data and its parameters: the smallest thing that trains, for tests of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import yaml
from onnx import TensorProto, helper, numpy_helper

from onward.cli import main
from onward.data.shard_writer import ShardWriter
from onward.environment import Environment
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.watching import Recorder

FEATURES, HIDDEN, CLASSES = 6, 8, 4
ON_ONE_THREAD = Environment(execution_provider="CPU", threads=1)
CROSS_ENTROPY = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"}
SQUARES = {"type": "mean_squared_error", "prediction": "logits", "label": "target"}


def weights() -> dict[str, np.ndarray]:
    """The initial weights, in the order of the graph."""
    generator = np.random.default_rng(11)

    def draw(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape) * 0.5).astype(np.float32)

    return {
        "w1": draw(FEATURES, HIDDEN),
        "b1": draw(HIDDEN),
        "w2": draw(HIDDEN, CLASSES),
        "b2": draw(CLASSES),
    }


def build_mlp(*, dropout: float = 0.0, normalized: bool = False) -> onnx.ModelProto:
    """`x [batch, 6]` -> `logits [batch, 4]`, with dropout and batch normalization on request."""
    tensors = weights()
    nodes = [helper.make_node("Gemm", ["x", "w1", "b1"], ["h1"], name="first")]
    last = "h1"
    if normalized:
        statistics = {"scale": np.ones, "shift": np.zeros, "running_mean": np.zeros, "running_var": np.ones}
        tensors |= {name: make(HIDDEN, np.float32) for name, make in statistics.items()}
        nodes.append(helper.make_node("BatchNormalization", [last, *statistics], ["normalized"], name="norm"))
        last = "normalized"
    nodes.append(helper.make_node("Relu", [last], ["active"], name="relu"))
    last = "active"
    if dropout:
        tensors["ratio"] = np.array(dropout, np.float32)
        nodes.append(helper.make_node("Dropout", [last, "ratio"], ["kept"], name="dropout"))
        last = "kept"
    nodes.append(helper.make_node("Gemm", [last, "w2", "b2"], ["logits"], name="second"))
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def save_mlp(folder: Path, **options: Any) -> Path:
    """Writes the model to `mlp.onnx` of a folder."""
    path = folder / "mlp.onnx"
    onnx.save(build_mlp(**options), path)
    return path


def data(samples: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs in clusters, one a class, with the class as label and twice the first inputs as target."""
    generator = np.random.default_rng(seed)
    label = generator.integers(0, CLASSES, samples)
    centres = np.eye(CLASSES, FEATURES, dtype=np.float32) * 2
    x = centres[label] + generator.standard_normal((samples, FEATURES)).astype(np.float32) * 0.5
    return {"x": x, "label": label, "target": x[:, :CLASSES] * 2}


def write_shards(folder: Path, features: Mapping[str, np.ndarray], files: int = 2) -> Path:
    """Writes features to shards in a new folder."""
    folder.mkdir(parents=True)
    samples = len(next(iter(features.values())))
    for number in range(files):
        with ShardWriter(folder / f"{number}.pb") as writer:
            for row in range(number, samples, files):
                writer.write({name: array[row] for name, array in features.items()})
    return folder


def parameters(folder: Path, **changes: Any) -> Parameters:
    """A run of 8 steps over `mlp.onnx` of a folder, some fields of its sections changed."""
    sections: dict[str, dict[str, Any]] = {
        "paths": {"model_path": folder / "mlp.onnx"},
        "loss": dict(CROSS_ENTROPY),
        "training": {"batch_size": 4, "num_train_steps": 8, "display_loss_steps": 1},
        "learning_rate": {"initial_lr": 0.1},
    }
    for name, fields in changes.items():
        replaces = name == "loss" or not isinstance(fields, dict)
        sections[name] = fields if replaces else {**sections.get(name, {}), **fields}
    return Parameters.from_mapping(sections)


def start(folder: Path, *watchers: Any, **changes: Any) -> tuple[TrainingRunner, Recorder]:
    """An initialized runner with a recorder; the model is written where there is none."""
    if not (folder / "mlp.onnx").exists():
        save_mlp(folder)
    recorder = Recorder()
    asked = parameters(folder, **changes)
    runner = TrainingRunner(asked, ON_ONE_THREAD, [recorder, *watchers], progress=False)
    runner.initialize()
    return runner, recorder


def weights_of(runner: TrainingRunner) -> dict[str, torch.Tensor]:
    """Copies of all tensors of the network: weights, running statistics and constants."""
    return {name: tensor.detach().clone() for name, tensor in runner.net.tensors_by_name().items()}


def assert_same_bits(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Every tensor equal to its last bit, and the same names."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def state_bits(runner: TrainingRunner) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint of the runner would hold in tensors, copied."""
    return {name: sharded.tensor.detach().clone() for name, sharded in runner.state.sharded_tensors().items()}


def forward(x: np.ndarray, tensors: Mapping[str, Any]) -> np.ndarray:
    """The network in numpy, in float64: what it gives without dropout."""
    w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    return np.maximum(x.astype(np.float64) @ w["w1"] + w["b1"], 0) @ w["w2"] + w["b2"]


def cross_entropies(logits: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Of each sample, in numpy."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(label)), label]


def batches_of(features: Mapping[str, np.ndarray], size: int) -> Iterator[dict[str, np.ndarray]]:
    """Full batches in order."""
    for first in range(0, len(next(iter(features.values()))), size):
        yield {name: array[first : first + size] for name, array in features.items()}


def write_adam_run(folder: Path, **training: int) -> Path:
    """A RUN.yaml that trains the network with Adam; fields of `training` on request."""
    run = {
        "paths": {"model_path": "mlp.onnx", "train_data_dir": "train"},
        "loss": dict(CROSS_ENTROPY),
        "training": {"batch_size": 4, "num_train_steps": 8, **training},
        "learning_rate": {"initial_lr": 0.1},
        "optimizer": {"training_optimizer_name": "Adam"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def write_sgd_run(folder: Path, **sections: Any) -> Path:
    """A RUN.yaml of 8 steps of plain SGD over 32 samples in order, with the model and shards it names."""
    save_mlp(folder)
    write_shards(folder / "train", data(32), files=1)
    run = {
        "paths": {"model_path": "mlp.onnx", "train_data_dir": "train", "output_dir": "out"},
        "loss": SQUARES,
        "training": {"batch_size": 4, "num_train_steps": 8},
        "learning_rate": {"initial_lr": 0.1},
        "data": {"shuffle_data": False},
        "optimizer": {"training_optimizer_name": "SGDOptimizer"},
        **sections,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def train_run(path: Path) -> dict[str, torch.Tensor]:
    """The weights after `onward train` of a RUN.yaml of `write_sgd_run`."""
    assert main(["train", str(path)]) == 0
    trained = onnx.load(path.parent / "out" / "mlp_trained.onnx").graph.initializer
    return {tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy()) for tensor in trained}


def train_by_torch(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rates: Sequence[float]
) -> dict[str, Any]:
    """The weights that torch's autograd and SGD make of the batches of `write_sgd_run`."""
    held = {name: torch.tensor(array, requires_grad=True) for name, array in weights().items()}
    optimizer = torch.optim.SGD(held.values(), lr=0.0)
    for batch, rate in zip(batches_of(data(32), 4), rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        hidden = torch.relu(torch.from_numpy(batch["x"]) @ held["w1"] + held["b1"])
        loss(hidden @ held["w2"] + held["b2"], torch.from_numpy(batch["target"])).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in held.items()}

"""Module paths of weights: from torch's exporters, Keras conversions; in rules, messages and the inspection."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import onward
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError, NodeError, ParametersError
from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render
from onward.graph.training_graph import make_training_graph
from onward.graph.weights.names import WeightNames
from onward.optim.building import attributes_of_weight, unmatched_rules, with_exact_names
from onward.parameters import Parameters
from onward.report.tensorboard import TensorBoardWatcher
from onward.runner import TrainingRunner
from tests.graph.exported import export
from tests.watching import Recorder


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.tail = nn.ModuleList(Block() for _ in range(2)), nn.Sequential(nn.Linear(8, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.tail(x)


def file_of(folder: Path, dynamo: bool) -> Path:
    torch.manual_seed(0)
    module = Net()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return export(module, (torch.randn(2, 3, 8),), folder / "m.onnx", 18 if dynamo else 17, dynamo)


BOTH = pytest.mark.parametrize("dynamo", [True, False], ids=["new", "old"])


@BOTH
def test_every_weight_has_the_path_of_its_parameter(dynamo: bool, tmp_path: Path) -> None:
    graph = make_training_graph(file_of(tmp_path, dynamo))
    known = {graph.known_as.paths.get(name, name) for name in graph.weights}
    assert known == {name for name, _ in Net().named_parameters()}
    assert len(graph.known_as.paths) == 5, "the transposed matrices, whose names are made up"
    stored = {path: graph.model.graph.initializers[name] for name, path in graph.known_as.paths.items()}
    assert not [path for path, value in stored.items() if value.const_value.shape == ()], "epsilons of norms"
    up = stored["layers.0.up.weight"].const_value
    assert up is not None
    assert tuple(up.shape) == (8, 12)


@BOTH
def test_rules_match_paths_and_messages_show_them(dynamo: bool, tmp_path: Path) -> None:
    path = file_of(tmp_path, dynamo)
    graph = make_training_graph(
        path, weights_to_train=["layers.1.*", "tail.0.weight"], weights_not_to_train=["*.down.*"]
    )
    shown = {graph.known_as.paths.get(name, name) for name in graph.weights}
    parts = ("norm.weight", "norm.bias", "up.weight", "up.bias")
    assert shown == {*(f"layers.1.{part}" for part in parts), "tail.0.weight"}
    (name,) = [one for one, known in graph.known_as.paths.items() if known == "layers.0.up.weight"]
    assert f"layers.0.up.weight ({name})" in render(inspect(path))
    with pytest.raises(ModelError, match=r"weights_to_train: 'layers.0.op.weight' matches none .*'layers.0.up.weight'"):
        make_training_graph(path, weights_to_train=["layers.0.op.weight"])


class Layer(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(4) if has_norm else nn.Identity(), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.norm(x))


class Chain(nn.Module):
    """Calls its children in order, and the elements of lists among them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            for module in child if isinstance(child, nn.ModuleList) else [child]:
                x = module(x)
        return x


def random_tree(draw: random.Random, depth: int = 0) -> nn.Module:
    """Modules in modules, lists and sequences, whose names repeat: `model.model.layers.0.layers.1.proj`."""
    if depth > 3 or (depth and draw.random() < 0.3):
        return Layer(draw.random() < 0.7)
    kind = draw.choice((Chain, Chain, nn.ModuleList, nn.Sequential)) if depth else Chain
    if kind is Chain:
        chain = Chain()
        for name in draw.sample(("model", "layers", "block"), draw.choice((1, 1, 2))):
            chain.add_module(name, random_tree(draw, depth + 1))
        return chain
    elements = [random_tree(draw, depth + 1) for _ in range(draw.choice((1, 2)))]
    called = [Layer(True) if isinstance(one, nn.ModuleList) else one for one in elements]
    return nn.Sequential(*called) if kind is nn.Sequential else nn.ModuleList(called)


@BOTH
@pytest.mark.parametrize("seed", range(12))
def test_paths_are_those_of_the_module_whatever_the_names_of_its_modules(
    seed: int, dynamo: bool, tmp_path: Path
) -> None:
    """Containers put their name before that of an element; a module in one of the same name is no container."""
    torch.manual_seed(seed)
    module = random_tree(random.Random(seed))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    path = export(module, (torch.randn(2, 3, 4),), tmp_path / "m.onnx", 18 if dynamo else 17, dynamo)
    graph = make_training_graph(path)
    of_numbers = {parameter.detach().numpy().T.tobytes(): name for name, parameter in module.named_parameters()}
    for name in graph.weights:
        tensor = graph.model.graph.initializers[name].const_value
        assert tensor is not None
        assert graph.known_as.paths.get(name, name) == of_numbers[np.ascontiguousarray(tensor.numpy()).tobytes()]


def test_optimizer_rules_match_paths(tmp_path: Path) -> None:
    graph = make_training_graph(file_of(tmp_path, True))
    sections = {
        "paths": {"model_path": "m.onnx"},
        "loss": {"type": "output", "prediction": "y"},
        "training": {"num_train_steps": 1, "batch_size": 1},
        "learning_rate": {"initial_lr": 0.1},
        "optimizer": {
            "training_optimizer_name": "AdamW",
            "optimizer_attributes": [{"weights": "layers.*.up.weight", "lambda": 0.5}, {"weights": "nothing.*"}],
        },
    }
    optimizer = Parameters.from_mapping(sections).optimizer
    rules = with_exact_names(optimizer, graph)
    decayed = {graph.known_as.paths[n] for n in graph.weights if attributes_of_weight(rules, n)["lambda"] == 0.5}
    assert decayed == {"layers.0.up.weight", "layers.1.up.weight"}
    assert unmatched_rules(optimizer, graph.weights, graph.known_as) == ["nothing.*"]


def test_an_error_names_the_module_of_its_node(tmp_path: Path) -> None:
    net = onward.to_torch(file_of(tmp_path, True))
    with pytest.raises(NodeError, match=r"\) of layers\.0\.\w+ failed on inputs"):
        net(torch.randn(2, 3, 7))


def test_a_dropped_bias_is_named_by_its_layer(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    nn.init.zeros_(module[2].bias)
    graph = make_training_graph(export(module, (torch.randn(2, 8),), tmp_path / "m.onnx", 18, True))
    assert any(note.startswith("node '2 (node_") for note in graph.notes)


def test_paths_of_keras_files() -> None:
    """As tf2onnx names variables and nodes: folded kernels are reported by the node that reads them."""
    scope = "StatefulPartitionedCall/net"
    tensors = {
        f"{scope}/dense/MatMul/ReadVariableOp:0": (4, 5),
        f"{scope}/dense/BiasAdd/ReadVariableOp:0": (5,),
        "const_fold_opt__31": (5, 3),
        f"{scope}/embedding/embedding_lookup/Read/ReadVariableOp:0": (6, 4),
    }
    embedding, kernel, bias = (list(tensors)[index] for index in (3, 0, 1))
    nodes = [
        helper.make_node("Gather", [embedding, "i"], ["e"], name=f"{scope}/embedding/embedding_lookup"),
        helper.make_node("MatMul", ["e", kernel], ["m"], name=f"{scope}/dense/MatMul"),
        helper.make_node("Add", ["m", bias], ["a"], name=f"{scope}/dense/BiasAdd"),
        helper.make_node("MatMul", ["a", "const_fold_opt__31"], ["y"], name=f"{scope}/head/MatMul"),
    ]
    rng = np.random.default_rng(0)
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("i", onnx.TensorProto.INT64, ["N"])],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 3])],
            [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in tensors.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    graph = make_training_graph(model, weights_to_train=["net.*"])
    assert [graph.known_as.paths[name] for name in graph.weights] == [
        "net.dense.kernel",
        "net.dense.bias",
        "net.head.kernel",
        "net.embedding.embeddings",
    ]


def test_two_weights_of_one_path_are_told_apart() -> None:
    names = WeightNames({"a": "dense.kernel", "b": "dense.kernel#2"})
    assert names.matches("b", "dense.*")
    assert not names.matches("b", ["dense.kernel"])
    assert names.listed(["a", "b", "c"], 2) == "dense.kernel (a), dense.kernel#2 (b) and 1 more"


def test_a_run_reports_tensors_that_are_asked_for_by_path(tmp_path: Path) -> None:
    path = file_of(tmp_path, True)
    (name,) = [n for n, known in make_training_graph(path).known_as.paths.items() if known == "layers.0.up.weight"]
    names = ("layers.0.up.weight", "layers.0.up.weight_grad")
    board = {"log_dir": str(tmp_path / "board"), "norm_names": list(names)}
    sections = {
        "paths": {"model_path": str(path)},
        "loss": {"type": "mean_squared_error", "prediction": make_training_graph(path).model.graph.outputs[0].name,
                 "label": "t"},
        "training": {"num_train_steps": 1, "batch_size": 2, "display_loss_steps": 1},
        "learning_rate": {"initial_lr": 0.1},
        "tensorboard": board,
    }  # fmt: skip
    recorder, watcher = Recorder(), TensorBoardWatcher(tmp_path / "board", norm_names=names)
    runner = TrainingRunner(Parameters.from_mapping(sections), watchers=[recorder])
    runner.initialize()
    rng = np.random.default_rng(0)
    data = {"x": rng.random((2, 3, 8), np.float32), "t": rng.random((2, 3, 4), np.float32)}
    runner.run(InMemoryDataLoader(data))
    (report,) = recorder.steps
    assert report.module_paths == {name: names[0], f"{name}_grad": names[1]}
    assert set(report.tensors) == {name, f"{name}_grad"}
    watcher.on_step(report)
    watcher.close()
    wrong = {**sections, "tensorboard": {**board, "norm_names": ["layers.7.up.weight"]}}
    with pytest.raises(ParametersError, match=r"tensorboard names 'layers\.7\.up\.weight': neither a value"):
        TrainingRunner(Parameters.from_mapping(wrong)).initialize()

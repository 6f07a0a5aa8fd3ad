"""The layers of a network: blocks that repeat and what is around them, training the last, and rates by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from onward.cli import main
from onward.engine.building.preparation import read_training_graph
from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.models import create_model
from onward.optim.building import make_optimizer, with_exact_names
from onward.parameters import Parameters
from onward.plan.layers import find_layers
from tests.plan.staged_models import BERT, GPT2, mlp


def parameters_of(folder: Path, model: ir.Model, **sections: Any) -> Parameters:
    ir.save(model, folder / "model.onnx")
    base: dict[str, Any] = {
        "paths": {"model_path": str(folder / "model.onnx")},
        "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
        "training": {"batch_size": 2, "num_train_steps": 1},
        "learning_rate": {"initial_lr": 0.1},
    }
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields}
    return Parameters.from_mapping(base)


def gpt2(**options: Any) -> TrainingGraph:
    return make_training_graph(create_model("gpt2", **{**GPT2, **options}), fuse=True)


def test_a_transformer_has_its_embeddings_its_blocks_and_its_end() -> None:
    """An output layer that is tied to the embedding is of the first layer, and the last holds the last norm."""
    layers = find_layers(gpt2())
    assert (layers.count, layers.blocks) == (6, range(1, 5))
    for name, layer in layers.of_weight.items():
        expected = int(name.split(".")[1]) + 1 if name.startswith("h.") else 5 if name.startswith("ln_f") else 0
        assert layer == expected, name
    bert = find_layers(make_training_graph(create_model("bert", **BERT), fuse=True))
    assert (bert.count, bert.blocks) == (6, range(1, 5))
    assert {layer for name, layer in bert.of_weight.items() if name.startswith("cls.")} <= {0, 5}


def test_layers_that_do_not_repeat_are_one_each() -> None:
    """fc0 to fc3 are 8 x 8, of which the last, `logits`, differs."""
    layers = find_layers(make_training_graph(mlp(4)))
    assert layers.count == 4
    assert {name: layer for name, layer in layers.of_weight.items() if name.endswith("weight")} == {
        f"fc{index}.weight": index for index in range(4)
    }


@pytest.mark.parametrize("blocks", [0, 1, 4])
def test_train_last(blocks: int, tmp_path: Path) -> None:
    """By name: the last blocks and the last norm; the rest is frozen, and the run reports how much."""
    parameters = parameters_of(tmp_path, create_model("gpt2", **GPT2), training={"train_last": blocks})
    graph = read_training_graph(parameters)
    last = tuple(f"h.{index}." for index in range(4 - blocks, 4))
    assert set(graph.weights) == {name for name in gpt2().weights if name.startswith((*last, "ln_f"))}
    assert set(gpt2().weights) - set(graph.weights) <= graph.frozen.keys()
    words = f"training.train_last is {blocks}: of 6 layers, 4 of them blocks, the last {blocks + 1} are trained, "
    assert graph.notes[0].startswith(words)


def test_more_than_there_are(tmp_path: Path) -> None:
    parameters = parameters_of(tmp_path, create_model("gpt2", **GPT2), training={"train_last": 5})
    words = r"training\.train_last is 5; the network has 4 blocks, and 1 layers after them\. Set it to 0 to 4, or name"
    with pytest.raises(ParametersError, match=words):
        read_training_graph(parameters)


def test_freeze_is_another_name(tmp_path: Path) -> None:
    parameters = parameters_of(tmp_path, create_model("gpt2", **GPT2), training={"freeze": ["w?e.weight"]})
    assert parameters.training.weights_not_to_train == ("w?e.weight",)
    assert {"wte.weight", "wpe.weight"} <= read_training_graph(parameters).frozen.keys()
    words = "training.freeze is another name of training.weights_not_to_train, and both are given; remove one of them."
    with pytest.raises(ParametersError, match=words):
        parameters_of(tmp_path, create_model("gpt2", **GPT2), training={"freeze": ["a"], "weights_not_to_train": ["b"]})


def test_layer_decay_equals_groups_by_hand() -> None:
    """5 updates of AdamW in torch, in a group for each layer, and a rule's own factor on top of it: to 1e-6."""
    graph, decay, rate = gpt2(), 0.5, 0.01
    section = {
        "training_optimizer_name": "AdamW",
        "layer_decay": decay,
        "optimizer_attributes": [{"weights": "*bias", "learning_rate_factor": 2.0}],
    }
    settings = Parameters.from_mapping({**SMALL, "optimizer": section}).optimizer
    rules = with_exact_names(settings, graph)
    assert with_exact_names(rules, graph).layer_decay is None
    shapes = {name: [int(n) for n in graph.model.graph.initializers[name].shape or ()] for name in graph.weights}

    def weights() -> dict[str, torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}

    ours, theirs = weights(), weights()
    optimizer = make_optimizer(rules, ours)
    groups = []
    for name, weight in theirs.items():
        distance = 4 - int(name.split(".")[1]) if name.startswith("h.") else 0 if name.startswith("ln_f") else 5
        factor = decay**distance * (2.0 if name.endswith("bias") else 1.0)
        groups.append({"params": [weight], "lr": rate * factor})
    peer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
    for step in range(5):
        for name in ours:
            generator = torch.Generator().manual_seed(step)
            ours[name].grad = theirs[name].grad = torch.randn(shapes[name], generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["learning_rate_factor"]
        optimizer.step()
        peer.step()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-6)


def test_a_plan_lists_the_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ir.save(create_model("gpt2", **GPT2), tmp_path / "model.onnx")
    run = """
paths: {model_path: model.onnx}
loss: {type: softmax_cross_entropy, prediction: logits, label: labels}
training: {batch_size: 2, num_train_steps: 1, mapped_dimensions: {sequence: 12}}
learning_rate: {initial_lr: 0.1}
optimizer: {training_optimizer_name: AdamW, layer_decay: 0.5}
"""
    (tmp_path / "run.yaml").write_text(run)
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    text = capsys.readouterr().out.partition("Learning rate of the layers")[2].splitlines()[1:8]
    assert [line.split()[:3] for line in text] == [
        ["layer", "times", "weights"], ["0", "0.03125", "2"], ["1", "0.0625", "12"], ["2", "0.125", "12"],
        ["3", "0.25", "12"], ["4", "0.5", "12"], ["5", "1", "2"],
    ]  # fmt: skip


SMALL: dict[str, Any] = {
    "paths": {"model_path": "model.onnx"},
    "loss": {"type": "l1", "prediction": "p", "label": "t"},
    "training": {"batch_size": 1, "num_train_steps": 1},
    "learning_rate": {"initial_lr": 0.1},
}

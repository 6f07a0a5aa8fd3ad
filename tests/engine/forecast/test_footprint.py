"""The optimizer's state that a forecast counts: that of torch's own optimizers after an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onward.engine.building.preparation import read_training_graph
from onward.engine.forecast.footprint import optimizer_slots
from onward.optim.building import with_exact_names
from onward.parameters import Parameters
from tests.mlp import save_mlp


@pytest.mark.parametrize(
    ("name", "rule", "make"),
    [
        ("SGDOptimizer", {}, lambda w: torch.optim.SGD(w, lr=0.1)),
        ("SGDOptimizer", {"momentum": 0.9}, lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9)),
        ("AdamW", {}, torch.optim.AdamW),
        ("Adafactor", {}, torch.optim.Adafactor),
        ("torch.optim.RMSprop", {"options": {"momentum": 0.9, "centered": True}},
         lambda w: torch.optim.RMSprop(w, momentum=0.9, centered=True)),
    ],
    ids=["SGD", "momentum", "AdamW", "Adafactor", "RMSprop"],
)  # fmt: skip
def test_slots_are_those_of_torch(tmp_path: Path, name: str, rule: dict[str, Any], make: Any) -> None:
    parameters = Parameters.from_mapping(
        {
            "paths": {"model_path": save_mlp(tmp_path)},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {"batch_size": 2, "num_train_steps": 1},
            "learning_rate": {"initial_lr": 0.1},
            "optimizer": {"training_optimizer_name": name, "optimizer_attributes": [{"weights": "*", **rule}]},
        }
    )
    graph = read_training_graph(parameters)
    initializers = graph.model.graph.initializers
    weights = [torch.nn.Parameter(torch.ones(*initializers[one].shape.numpy())) for one in graph.weights]  # type: ignore[union-attr]
    optimizer = make(weights)
    sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
    optimizer.step()
    held = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    expected = sum(one.nbytes for one in held) / sum(one.nbytes for one in weights)
    assert optimizer_slots(with_exact_names(parameters.optimizer, graph), graph) == pytest.approx(expected)

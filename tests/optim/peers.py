"""Weights of many shapes, and optimizers of onward and of others that update them with the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from onward.optim.building import make_optimizer, set_learning_rate
from onward.parameters import Optimizer, Parameters

SHAPES = {"h.0.weight": (5, 3), "h.0.bias": (5,), "norm.weight": (7,), "scale": (), "a[0]/w": (2, 2)}


def optimizer_of(name: str, rules: Any = (), **fields: Any) -> Optimizer:
    base = {
        "paths": {"model_path": "model.onnx"},
        "loss": {"type": "output", "prediction": "y"},
        "training": {"batch_size": 1, "num_train_steps": 1},
        "learning_rate": {"initial_lr": 0.1},
    }
    section = {"training_optimizer_name": name, "optimizer_attributes": rules, **fields}
    return Parameters.from_mapping({**base, "optimizer": section}).optimizer


def weights(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def give_gradients(given: Mapping[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for weight in given.values():
        weight.grad = torch.randn(weight.shape, generator=generator)


UPDATES = 20
Make = Callable[[dict[str, nn.Parameter]], list[torch.optim.Optimizer]]


def train(
    settings: Optimizer, given: dict[str, nn.Parameter], rate: float, updates: int = UPDATES
) -> torch.optim.Optimizer:
    optimizer = make_optimizer(settings, given)
    for step in range(updates):
        give_gradients(given, step)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    return optimizer


def train_peer(make: Make, given: dict[str, nn.Parameter], updates: int = UPDATES) -> None:
    optimizers = make(given)
    for step in range(updates):
        give_gradients(given, step)
        for optimizer in optimizers:
            optimizer.step()


def assert_near(ours: dict[str, nn.Parameter], theirs: dict[str, nn.Parameter], bound: float) -> None:
    for name, weight in theirs.items():
        difference = float((ours[name] - weight).detach().abs().max() / weight.detach().abs().max())
        assert difference <= bound, f"{name} differs by {difference:.1e}"

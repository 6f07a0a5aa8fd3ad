"""Trained or new: weights as frameworks draw them, before and after a little training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from onward.graph.training_graph import make_training_graph
from onward.proposal.initialization import Origin, find_origin
from tests.graph.exported import export


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 5))


def drawn(draw: Callable[[torch.Tensor], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32))
        for parameter in net.parameters():
            draw(parameter) if parameter.ndim > 1 else nn.init.zeros_(parameter)
        return net

    return make


FRESH: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutional": (convolutional, (4, 3, 12, 12)),
    "perceptron": (perceptron, (4, 12)),
    "layer normalization": (normalized, (4, 12)),
    "xavier uniform": (drawn(nn.init.xavier_uniform_), (4, 64)),
    "xavier normal": (drawn(nn.init.xavier_normal_), (4, 64)),
    "kaiming uniform": (drawn(lambda w: nn.init.kaiming_uniform_(w, nonlinearity="relu")), (4, 64)),
    "kaiming normal": (drawn(lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu")), (4, 64)),
    "orthogonal": (drawn(nn.init.orthogonal_), (4, 64)),
    "normal 0.02": (drawn(lambda w: nn.init.normal_(w, std=0.02)), (4, 64)),
    "truncated normal 0.02": (drawn(lambda w: nn.init.trunc_normal_(w, std=0.02)), (4, 64)),
    "zeros": (drawn(nn.init.zeros_), (4, 64)),
}


def origin_of(net: nn.Module, shape: tuple[int, ...], folder: Path, dynamo: bool = False) -> Origin:
    path = export(net.eval(), (torch.randn(shape),), folder / "net.onnx", 18, dynamo)
    return find_origin(make_training_graph(path))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FRESH)
def test_new_weights_look_new(name: str, seed: int, tmp_path: Path) -> None:
    make, shape = FRESH[name]
    torch.manual_seed(seed)
    origin = origin_of(make(), shape, tmp_path)
    assert not origin.is_trained, origin.evidence


@pytest.mark.parametrize("name", [name for name in FRESH if name != "zeros"])
def test_weights_after_some_training_look_trained(name: str, tmp_path: Path) -> None:
    make, shape = FRESH[name]
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    inputs = torch.randn(64, *shape[1:])
    labels = inputs.flatten(1)[:, :5].argmax(1)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    origin = origin_of(net, shape, tmp_path)
    assert origin.is_trained, origin.evidence


def test_running_statistics_decide(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
    new = origin_of(net, (16, 12), tmp_path)
    assert not new.is_trained, new.evidence
    net.train()
    net(3 + torch.randn(16, 12))
    used = origin_of(net, (16, 12), tmp_path)
    assert used.is_trained
    assert "running statistics of batch normalization" in used.evidence


def test_a_perceptron_of_sklearn_is_trained(tmp_path: Path) -> None:
    """Fitted by another library, its weights put into torch's module."""
    neural_network = pytest.importorskip("sklearn.neural_network", reason="scikit-learn is not installed")
    generator = np.random.default_rng(0)
    inputs = generator.standard_normal((200, 12))
    fitted = neural_network.MLPClassifier((32,), max_iter=60, random_state=0).fit(inputs, inputs[:, :5].argmax(1))
    net = perceptron()
    with torch.no_grad():
        for layer, weights, bias in zip((net[0], net[2]), fitted.coefs_, fitted.intercepts_, strict=True):
            layer.weight.copy_(torch.tensor(weights.T))
            layer.bias.copy_(torch.tensor(bias))
    assert origin_of(net, (4, 12), tmp_path).is_trained

"""SqueezeNet 1.1 as ONNX against the same network written here for torch, after torchvision's description of it."""

from __future__ import annotations

import math

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import onward
from onward.models import create_model
from tests.models.running import (
    OPSETS,
    initial_weights,
    largest_difference,
    replace_weights,
    run_onnxruntime,
    shake,
)


class Fire(nn.Module):
    """Squeeze, then two expansions side by side."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.squeeze(x).relu()
        return torch.cat([self.expand1x1(x).relu(), self.expand3x3(x).relu()], 1)


class SqueezeNet(nn.Module):
    """Version 1.1 for images of 224 pixels."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 64, 3, 2), nn.ReLU(), pool,
            Fire(64, 16, 64), Fire(128, 16, 64), pool,
            Fire(128, 32, 128), Fire(256, 32, 128), pool,
            Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Dropout(0.0), nn.Conv2d(512, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))


class NormalizedFire(nn.Module):
    """Fire with batch normalization instead of biases."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = normalized(inputs, squeezed, 1, 0)
        self.expand1x1 = normalized(squeezed, expanded, 1, 0)
        self.expand3x3 = normalized(squeezed, expanded, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.squeeze(x)
        return torch.cat([self.expand1x1(x), self.expand3x3(x)], 1)


def normalized(inputs: int, outputs: int, kernel: int, padding: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def small_normalized_network() -> nn.Sequential:
    """For 8 pixels: the first convolution keeps the size, one pooling of the three is left."""
    return nn.Sequential(
        normalized(1, 64, 3, 1), nn.MaxPool2d(3, 2, ceil_mode=True),
        NormalizedFire(64, 16, 64), NormalizedFire(128, 16, 64), NormalizedFire(128, 32, 128),
        NormalizedFire(256, 32, 128), NormalizedFire(256, 48, 192), NormalizedFire(384, 48, 192),
        NormalizedFire(384, 64, 256), NormalizedFire(512, 64, 256),
        nn.Conv2d(512, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def load_in_order(network: nn.Module, weights: dict[str, torch.Tensor]) -> list[str]:
    """Fills the network's state with the weights in their order, which is the order of computation in both.

    Returns the names of the weights in the order of the network's state.
    """
    state = {name: value for name, value in network.state_dict().items() if "num_batches_tracked" not in name}
    assert len(state) == len(weights)
    network.load_state_dict(dict(zip(state, weights.values(), strict=True)), strict=False)
    return list(weights)


def images(batch: int, channels: int, size: int) -> torch.Tensor:
    return torch.rand(batch, channels, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [224, 65])
def test_logits_equal_those_of_torch(size: int) -> None:
    model = create_model("squeezenet", image_size=size, classes=7)
    weights = shake(initial_weights(model))
    replace_weights(model, weights)
    network = SqueezeNet(3, 7).eval()
    network.load_state_dict(weights)
    given = images(1, 3, size)
    assert largest_difference(run_onnxruntime(model, given), [network(given).detach()]) < 1e-5


def test_gradients_equal_those_of_torch() -> None:
    model = create_model("squeezenet", image_size=65, classes=7, dropout=0.0)
    weights = shake(initial_weights(model))
    network, net = SqueezeNet(3, 7), None
    replace_weights(model, weights)
    network.load_state_dict(weights)
    net = onward.to_torch(model)
    given, labels = images(2, 3, 65), torch.tensor([3, 5])
    for logits in (network(given), net(given)):
        torch.nn.functional.cross_entropy(logits, labels).backward()
    expected = dict(network.named_parameters())
    assert set(net.weights) == set(expected)
    for name, weight in net.weights.items():
        assert weight.grad is not None
        assert largest_difference([weight.grad], [expected[name].grad]) < 1e-4, name


def test_small_images_with_batch_normalization_in_evaluation() -> None:
    model = create_model("squeezenet", image_size=8, channels=1, classes=10, batch_norm=True)
    weights = shake(initial_weights(model))
    replace_weights(model, weights)
    network = small_normalized_network().eval()
    load_in_order(network, weights)
    given = images(3, 1, 8)
    assert largest_difference(run_onnxruntime(model, given), [network(given).detach()]) < 1e-5


def test_small_images_with_batch_normalization_in_training() -> None:
    """Gradients, and the running statistics after two batches (torch keeps the unbiased variance, ONNX the biased)."""
    model = create_model("squeezenet", image_size=8, channels=1, classes=10, batch_norm=True, dropout=0.0)
    weights = shake(initial_weights(model))
    replace_weights(model, weights)
    network = small_normalized_network().train()
    names = load_in_order(network, weights)
    net = onward.to_torch(model).train()
    labels = torch.tensor([3, 5, 1, 8])
    for given in (images(4, 1, 8), images(4, 1, 8).flip(-1)):
        for module in (network, net):
            module.zero_grad()
            torch.nn.functional.cross_entropy(module(given), labels).backward()
    state = {name: value for name, value in network.state_dict().items() if "num_batches" not in name}
    gradients = dict(network.named_parameters())
    tensors = net.tensors_by_name()
    for name, place in zip(names, state, strict=True):
        if name in net.weights:
            weight = net.weights[name]
            assert weight.grad is not None
            assert largest_difference([weight.grad], [gradients[place].grad]) < 1e-4, name
        elif name.endswith("running_mean"):
            assert largest_difference([tensors[name]], [state[place]]) < 1e-5, name
        else:
            rows = 8 if name.startswith("features.0.") else 4
            count = 4 * rows * rows
            expected = weights[name] * 0.81 + (state[place] - weights[name] * 0.81) * (count - 1) / count
            assert largest_difference([tensors[name]], [expected]) < 1e-5, name


def test_numbers_of_the_release() -> None:
    """torchvision's squeezenet1_1 has 1,235,496 weights."""
    weights = initial_weights(create_model("squeezenet"))
    assert sum(math.prod(weight.shape) for weight in weights.values()) == 1_235_496


@pytest.mark.parametrize(
    ("size", "stride", "poolings", "last"),
    [(224, 2, 3, 13), (65, 2, 3, 4), (64, 2, 2, 7), (32, 2, 1, 7), (28, 2, 1, 6), (8, 1, 1, 4), (1, 1, 0, 1)],
)
def test_halvings_that_leave_less_than_four_rows_fall_away(size: int, stride: int, poolings: int, last: int) -> None:
    graph = create_model("squeezenet", image_size=size, channels=1).graph
    nodes = list(graph)
    assert nodes[0].attributes["strides"].as_ints() == (stride, stride)
    assert sum(node.op_type == "MaxPool" for node in nodes) == poolings
    concats = [node for node in nodes if node.op_type == "Concat"]
    assert concats[-1].outputs[0].shape == ("batch", 512, last, last)


@pytest.mark.parametrize("opset", OPSETS)
def test_the_checker_accepts_it(opset: int) -> None:
    for batch_norm in (False, True):
        model = create_model("squeezenet", opset=opset, image_size=8, channels=1, batch_norm=batch_norm)
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
        run_onnxruntime(model, images(2, 1, 8))

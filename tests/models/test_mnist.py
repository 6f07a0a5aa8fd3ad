"""The two MNIST networks as ONNX against the same networks written here for torch."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import onward
from onward.errors import ParametersError
from onward.models import create_model
from tests.models.running import (
    OPSETS,
    initial_weights,
    largest_difference,
    replace_weights,
    run_onnxruntime,
    shake,
)


def gemm_network() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10))


def conv_network(batch_norm: bool) -> nn.Sequential:
    """For 9 pixels: the pooling leaves the last row and column out."""
    first = [nn.Conv2d(1, 32, 3, padding=1, bias=not batch_norm), *([nn.BatchNorm2d(32)] if batch_norm else [])]
    second = [nn.Conv2d(32, 64, 3, padding=1, bias=not batch_norm), *([nn.BatchNorm2d(64)] if batch_norm else [])]
    return nn.Sequential(
        *first, nn.ReLU(), *second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


VARIANTS = {
    "gemm": ({"variant": "gemm"}, gemm_network, 28),
    "gemm on rows of pixels": ({"variant": "gemm", "flat_input": True}, gemm_network, 28),
    "conv": ({"variant": "conv", "image_size": 9}, lambda: conv_network(True), 9),
    "conv without norm": ({"variant": "conv", "image_size": 9, "batch_norm": False}, lambda: conv_network(False), 9),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_predictions_and_gradients_equal_those_of_torch(name: str) -> None:
    options, make, size = VARIANTS[name]
    model = create_model("mnist", dropout=0.0, **options)
    weights = shake(initial_weights(model))
    replace_weights(model, weights)
    network = make().eval()
    state = [key for key in network.state_dict() if "num_batches" not in key]
    network.load_state_dict(dict(zip(state, weights.values(), strict=True)), strict=False)
    images = torch.rand(3, 1, size, size, generator=torch.Generator().manual_seed(0))
    given = images.flatten(1) if options.get("flat_input") else images
    net = onward.to_torch(model)
    assert largest_difference(run_onnxruntime(model, given), [network(images).detach()]) < 1e-5
    for predictions in (network(images), net(given)):
        torch.nn.functional.cross_entropy(predictions, torch.tensor([1, 9, 4])).backward()
    trained = [key for key in weights if "running" not in key]
    assert set(net.weights) == set(trained)
    for key, parameter in zip(trained, network.parameters(), strict=True):
        gradient = net.weights[key].grad
        assert gradient is not None
        assert largest_difference([gradient], [parameter.grad]) < 1e-4, key


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("variant", ["gemm", "conv"])
def test_the_checker_accepts_it(opset: int, variant: str) -> None:
    model = create_model("mnist", opset=opset, variant=variant)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == ["X", "predictions"]
    assert run_onnxruntime(model, torch.zeros(2, 1, 28, 28))[0].shape == (2, 10)


def test_impossible_options() -> None:
    with pytest.raises(ParametersError, match="flat_input is for the variant gemm; conv needs rows and columns"):
        create_model("mnist", variant="conv", flat_input=True)
    with pytest.raises(ParametersError, match="image_size must be at least 2, got 1"):
        create_model("mnist", variant="conv", image_size=1)

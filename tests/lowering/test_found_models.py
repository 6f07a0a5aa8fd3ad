"""Architectures as other tools leave them: torch's older exporter, onnxruntime's optimizer, conversion to float16.

Bounds as for the newer exporter; float16 is compared within its precision.
"""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import onward
from tests.lowering.architecture import Architecture, export_program
from tests.lowering.architectures import ARCHITECTURES
from tests.lowering.saved_models import optimized
from tests.lowering.test_architectures import (
    _all,
    _arrangement,
    _assert_same_gradient,
    _assert_same_outputs,
    _assert_weights_are_parameters,
    _gradients,
    _run,
)
from tests.lowering.vision_models import randomize

pytest.importorskip("transformers")

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
SLOW = pytest.mark.slow


def _module(architecture: Architecture) -> nn.Module:
    torch.manual_seed(0)
    return randomize(architecture.make()).eval()


def _exported_by_tracing(module: nn.Module, inputs: tuple[Tensor, ...], opset: int, fold: bool) -> onnx.ModelProto:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, inputs, file, dynamo=False, opset_version=opset, do_constant_folding=fold)
    return onnx.load_from_string(file.getvalue())


TRACED = [
    ("residual", 11),
    ("wavenet", 11),
    ("volume", 13),
    ("bidirectional_lstm", 17),
    ("gru", 11),
    ("transformer_encoder", 17),
    ("mixer", 13),
    ("tied_autoencoder", 13),
    ("einsum", 17),
    ("graph_convolution", 13),
    ("convnext", 11),
    ("bloom", 13),
    ("albert", 17),
    ("t5", 17),
    pytest.param("bert", 17, marks=SLOW),
    pytest.param("opt", 17, marks=SLOW),
    pytest.param("swin", 13, marks=SLOW),
    pytest.param("siamese", 13, marks=SLOW),
    pytest.param("densenet", 11, marks=SLOW),
    pytest.param("distilbert", 17, marks=SLOW),
    pytest.param("vit", 17, marks=SLOW),
]


@pytest.mark.parametrize(("name", "opset"), TRACED)
def test_export_of_the_older_exporter_trains(name: str, opset: int, caplog: pytest.LogCaptureFixture) -> None:
    """Unfolded, every parameter trains under its name; folded, what is only transposed trains with its gradient."""
    caplog.set_level(logging.ERROR)
    architecture = BY_NAME[name]
    module = _module(architecture)
    expected = _run(module, architecture.inputs)
    gradients = _gradients(module)

    net = onward.to_torch(_exported_by_tracing(module, architecture.inputs, opset, fold=False))
    _assert_same_outputs(expected, _run(net, architecture.inputs))
    _assert_weights_are_parameters(module, net, gradients)

    net = onward.to_torch(_exported_by_tracing(module, architecture.inputs, opset, fold=True))
    _assert_same_outputs(expected, _run(net, architecture.inputs))
    assert _compared(module, net, gradients) >= 2
    assert all(weight.grad is not None for weight in net.weights.values())


class Recurrent(nn.Module):
    """A convolution and an LSTM whose initial state is zeros: what the oldest opsets can say."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.convolution(x)), 2)
        return torch.log_softmax(self.out(self.lstm(x.flatten(2).transpose(1, 2))[0][:, -1]), -1)


@pytest.mark.parametrize("opset", [7, *(pytest.param(one, marks=SLOW) for one in range(8, 21))])
def test_export_of_the_older_exporter_trains_at_every_opset_that_it_offers(opset: int) -> None:
    torch.manual_seed(0)
    module, x, weights = Recurrent(), torch.randn(2, 2, 4, 4), torch.randn(2, 3)
    net = onward.to_torch(_exported_by_tracing(module, (x,), opset, fold=True))
    torch.testing.assert_close(net(x), module(x), rtol=1e-5, atol=1e-6)
    for one in (net, module):
        (one(x) * weights).sum().backward()
    for name, parameter in module.named_parameters():
        if name in net.weights:
            torch.testing.assert_close(net.weights[name].grad, parameter.grad, rtol=1e-5, atol=1e-6)
    if opset < 9:  # nothing is folded: the parameters have their own names
        assert set(net.weights) == {name for name, _ in module.named_parameters()}
        return
    assert len(net.weights) == 7
    stacked = [weight.grad for weight in net.weights.values() if weight.dim() > 1 and weight.shape[0] == 1]
    squares = sum(parameter.grad.square().sum() for parameter in module.lstm.parameters())
    torch.testing.assert_close(sum(gradient.square().sum() for gradient in stacked), squares, rtol=1e-5, atol=1e-7)


def _compared(module: nn.Module, net: onward.OnnxModule, gradients: dict[str, Tensor]) -> int:
    """Compares the gradients of the weights that are parameters of the module; how many they are."""
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    count = 0
    for name, value in net.weights.items():
        found = [
            (gradients[parameter], how)
            for parameter, tensor in module.named_parameters()
            if parameter in gradients and (how := _arrangement(value, tensor)) in ("same", "transposed")
        ]
        if len(found) == 1:
            gradient, how = found[0]
            _assert_same_gradient(gradient.T if how == "transposed" else gradient, value.grad, largest, name)
            count += 1
    return count


OPTIMIZED = [
    ("albert", "extended"),
    ("llama", "extended"),
    ("separable", "extended"),
    ("wavenet", "basic"),
    pytest.param("bert", "extended", marks=SLOW),
    pytest.param("gpt2", "extended", marks=SLOW),
    pytest.param("gpt2", "basic", marks=SLOW),
    pytest.param("vit", "extended", marks=SLOW),
    pytest.param("swin", "extended", marks=SLOW),
    pytest.param("t5", "extended", marks=SLOW),
    pytest.param("bart", "extended", marks=SLOW),
    pytest.param("mobilenet_v2", "extended", marks=SLOW),
    pytest.param("phi", "extended", marks=SLOW),
    pytest.param("wav2vec2", "extended", marks=SLOW),
    pytest.param("bidirectional_gru", "extended", marks=SLOW),
    pytest.param("cross_attention", "extended", marks=SLOW),
]


@pytest.mark.parametrize(("name", "level"), OPTIMIZED)
def test_architecture_optimized_by_onnxruntime_trains(
    name: str, level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Same outputs; a gradient for everything that is a weight, the module's for what is still a parameter of it."""
    caplog.set_level(logging.ERROR)
    architecture = BY_NAME[name]
    module = _module(architecture)
    expected = _run(module, architecture.inputs)
    gradients = _gradients(module)
    program = export_program(module, architecture)
    program.optimize()
    net = onward.to_torch(optimized(program.model_proto, level, tmp_path))
    _assert_same_outputs(expected, _run(net, architecture.inputs))
    assert net.weights
    assert all(weight.grad is not None for weight in net.weights.values())
    assert _compared(module, net, gradients) > 0


@pytest.mark.parametrize(
    "name",
    ["wavenet", "llama", *(pytest.param(n, marks=SLOW) for n in ("gpt2", "bert", "vit", "resnet", "t5_encoder"))],
)
def test_architecture_converted_to_float16_trains(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Outputs to 3% of the largest; every weight gets a finite gradient that points where the module's does."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    caplog.set_level(logging.ERROR)
    architecture = BY_NAME[name]
    module = _module(architecture)
    expected = _run(module, architecture.inputs)
    gradients = _gradients(module)
    program = export_program(module, architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = convert_float_to_float16(program.model_proto, keep_io_types=True)
    net = onward.to_torch(model)
    actual = _all(_run(net, architecture.inputs))
    for left, right in zip(expected, actual, strict=True):
        assert (left - right).abs().max() <= 0.03 * left.abs().max()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    half = {weight for weight, value in net.weights.items() if value.dtype == torch.float16}
    assert len(half) > len(net.weights) // 2
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for weight, value in net.weights.items():
        assert value.grad is not None
        assert value.grad.isfinite().all()
        gradient = gradients[weight]
        assert weight in parameters
        if gradient.abs().max() > 0.01 * largest:
            assert nn.functional.cosine_similarity(value.grad.flatten().float(), gradient.flatten(), 0) > 0.99, weight

"""Networks exported by `torch.onnx.export(dynamo=True)` compute and differentiate like the original module.

Bounds: outputs to 1e-4 of the largest, every gradient to 1e-4 of the largest gradient of the network.
"""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout

import onnx
import pytest
import torch
from torch import Tensor, nn

import onward
from tests.lowering.vision_models import (
    RecurrentClassifier,
    SmallResNet,
    SmallSqueezeNet,
    SmallUNet,
    randomize,
)


def _export(module: nn.Module, inputs: tuple[Tensor, ...], opset: int, optimize: bool = False) -> onnx.ModelProto:
    """Without the exporter's optimizer parameters keep their names and batch normalization stays."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(module, inputs, dynamo=True, opset_version=opset, optimize=optimize, verbose=False)
    assert exported is not None
    return exported.model_proto


def _close(actual: Tensor, expected: Tensor, scale: float) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() <= 1e-4 * scale


def _compare_gradients(module: nn.Module, net: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Same outputs; same gradient of a random projection of them, for every parameter by name."""
    expected, actual = module(*inputs), net(*inputs)
    _close(actual, expected, expected.abs().max().item())
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    module.zero_grad()
    (expected * direction).sum().backward()
    (actual * direction).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    largest = max(g.abs().max().item() for g in gradients.values())
    assert largest > 0
    for name, gradient in gradients.items():
        found = net.weights[name].grad
        assert found is not None, name
        _close(found, gradient, largest)


IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
TOKENS = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(3))
CASES = {
    "resnet": (SmallResNet, IMAGE),
    "squeezenet": (SmallSqueezeNet, IMAGE[..., :31, :31]),
    "unet": (SmallUNet, IMAGE),
    "lstm": (lambda: RecurrentClassifier("LSTM"), TOKENS),
    "gru": (lambda: RecurrentClassifier("GRU"), TOKENS),
    "rnn": (lambda: RecurrentClassifier("RNN"), TOKENS),
}


@pytest.mark.parametrize(
    "opset", [pytest.param(13, marks=pytest.mark.slow), 18, pytest.param(20, marks=pytest.mark.slow), 23]
)
@pytest.mark.parametrize("name", list(CASES))
def test_export_computes_and_differentiates_like_the_module(name: str, opset: int) -> None:
    make, data = CASES[name]
    module = randomize(make()).eval()
    net = onward.to_torch(_export(module, (data,), opset))
    _compare_gradients(module, net, (data,))


@pytest.mark.parametrize("name", ["resnet", "squeezenet", "unet", "lstm", "gru"])
def test_optimized_export_computes_like_the_module(name: str) -> None:
    """The exporter's optimizer folds batch normalization away and stacks the gates; outputs stay."""
    make, data = CASES[name]
    module = randomize(make()).eval()
    net = onward.to_torch(_export(module, (data,), 18, optimize=True))
    expected = module(data)
    _close(net(data), expected, expected.abs().max().item())


def test_stacked_gates_of_an_optimized_lstm_train() -> None:
    """Gradients of the stacked W of layer 0 are the module's, in ONNX's order of gates (i, o, f, c)."""
    module = randomize(RecurrentClassifier("LSTM")).eval()
    model = _export(module, (TOKENS,), 18, optimize=True)
    net = onward.to_torch(model)
    first = next(node for node in model.graph.node if node.op_type == "LSTM")
    module(TOKENS).square().sum().backward()
    net(TOKENS).square().sum().backward()
    for place, name in ((1, "weight_ih_l0"), (2, "weight_hh_l0")):
        stacked = net.weights[first.input[place]].grad
        for direction, suffix in enumerate(("", "_reverse")):
            i, f, c, o = getattr(module.recurrent, name + suffix).grad.chunk(4)
            expected = torch.cat([i, o, f, c])
            _close(stacked[direction], expected, expected.abs().max().item())


def test_batch_normalization_in_training_mode_is_the_modules() -> None:
    """Outputs, gradients and running statistics over three steps; torch's variance is corrected by (N-1)/N."""
    module = randomize(SmallResNet()).eval()
    net = onward.to_torch(_export(module, (IMAGE,), 18))
    begun = {name: b.clone() for name, b in module.named_buffers()}
    module.train()
    net.train()
    counts = _elements_per_channel(module, IMAGE)
    for step in range(3):
        data = IMAGE * (1 + step)
        _compare_gradients(module, net, (data,))
        net.zero_grad()
    kept = 0.9**3
    states = dict(net.named_buffers())
    for name, buffer in module.named_buffers():
        if "running" not in name:
            continue
        expected = buffer
        if name.endswith("running_var"):
            n = counts[name.rsplit(".", 1)[0]]
            share = begun[name] * kept
            expected = share + (buffer - share) * ((n - 1) / n)
        torch.testing.assert_close(states[name], expected, rtol=1e-5, atol=1e-5)


def _elements_per_channel(module: nn.Module, data: Tensor) -> dict[str, int]:
    """Elements that each batch normalization averages over; leaves the module as it was."""
    counts: dict[str, int] = {}
    saved = {name: b.clone() for name, b in module.named_buffers()}
    hooks = [
        m.register_forward_pre_hook(lambda _, x, name=name: counts.update({name: x[0].numel() // x[0].shape[1]}))
        for name, m in module.named_modules()
        if isinstance(m, nn.BatchNorm2d)
    ]
    with torch.no_grad():
        module(data)
    for hook in hooks:
        hook.remove()
    for name, buffer in module.named_buffers():
        buffer.copy_(saved[name])
    return counts


def test_dropout_of_a_training_export_follows_the_network() -> None:
    """Exported in training mode, the node is there: nothing dropped in eval mode, half of it in training mode."""
    module = randomize(SmallSqueezeNet(dropout=0.5)).train()
    model = _export(module, (CASES["squeezenet"][1],), 18, optimize=True)
    assert any(node.op_type == "Dropout" for node in model.graph.node)
    net = onward.to_torch(model)
    data = CASES["squeezenet"][1]
    expected = module.eval()(data)
    _close(net(data), expected, expected.abs().max().item())
    torch.manual_seed(0)
    net.train()
    assert not torch.equal(net(data), net(data))

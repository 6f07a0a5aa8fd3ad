"""Transformers exported by `torch.onnx.export(dynamo=True)` compute and differentiate like the original module.

Bounds: outputs to 1e-4 of the largest, every gradient to 1e-4 of the largest gradient of the network.
"""

from __future__ import annotations

import functools
import io
import warnings
from contextlib import redirect_stderr, redirect_stdout

import onnx
import pytest
import torch
from torch import Tensor, nn

import onward
from onward.lowering.module import OnnxModule
from tests.lowering.language_models import MODELS
from tests.lowering.vision_models import randomize

pytest.importorskip("transformers")


@functools.cache
def exported(
    name: str, opset: int, dynamic: bool = True, optimize: bool = False, random: bool = True
) -> tuple[nn.Module, onnx.ModelProto]:
    """A network and its export; without the exporter's optimizer every parameter keeps its name."""
    make, inputs, axes = MODELS[name]
    torch.manual_seed(0)
    module = make().eval()
    if random:
        randomize(module)
    shapes = (tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for _ in inputs),) if dynamic else None
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, inputs, dynamo=True, opset_version=opset, optimize=optimize, dynamic_shapes=shapes, verbose=False
        )
    assert program is not None
    return module, program.model_proto


def assert_close(actual: Tensor, expected: Tensor, scale: float, what: str) -> None:
    assert actual.shape == expected.shape, what
    assert (actual - expected).abs().max().item() <= 1e-4 * scale, what


def gradients_of(module: nn.Module, net: OnnxModule, inputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], float]:
    """Compares the outputs, differentiates a random projection of both; the module's gradients and the largest."""
    expected, actual = module(*inputs), net(*inputs)
    assert_close(actual, expected, expected.abs().max().item(), "output")
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    module.zero_grad()
    net.zero_grad()
    (expected * direction).sum().backward()
    (actual * direction).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return gradients, max(g.abs().max().item() for g in gradients.values())


def longer(inputs: tuple[Tensor, ...], axes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The inputs at another size of every axis that may change."""
    for axis in axes:
        inputs = tuple(torch.cat([x, x.narrow(axis, 0, 1)], axis) for x in inputs)
    return inputs


SLOW = pytest.mark.slow
CASES = [
    ("gpt2", 18),
    ("bert", 20),
    ("llama", 23),
    ("vit", 18),
    *(
        pytest.param(name, opset, marks=SLOW)
        for name in MODELS
        for opset in (13, 18, 20, 23)
        if (name, opset) not in (("gpt2", 18), ("bert", 20), ("llama", 23), ("vit", 18))
    ),
]


@pytest.mark.parametrize(("name", "opset"), CASES)
def test_export_with_dynamic_shapes_computes_and_differentiates_like_the_module(name: str, opset: int) -> None:
    module, model = exported(name, opset)
    net = onward.to_torch(model)
    _, inputs, axes = MODELS[name]
    for given in (inputs, longer(inputs, axes)):
        gradients, largest = gradients_of(module, net, given)
        for weight, gradient in gradients.items():
            # A tied weight is exported under one of its names.
            names = [n for n, p in module.named_parameters(remove_duplicate=False) if p is module.get_parameter(weight)]
            (name_kept,) = (n for n in names if n in net.weights)
            found = net.weights[name_kept].grad
            assert found is not None, weight
            assert_close(found, gradient, largest, weight)


@pytest.mark.parametrize("name", ["vit", *(pytest.param(n, marks=SLOW) for n in ("gpt2", "bert", "llama"))])
def test_optimized_export_trains_the_same_tensors(name: str) -> None:
    """The exporter's optimizer transposes and renames matrices: gradients are matched through equal values."""
    module, model = exported(name, 20, optimize=True)
    net = onward.to_torch(model)
    parameters = dict(module.named_parameters())
    gradients, largest = gradients_of(module, net, MODELS[name][1])
    unmatched = set(gradients)
    for weight, parameter in net.weights.items():
        same = [
            (n, flip)
            for n in gradients
            for flip in (False, True)
            if _equal(parameters[n].T if flip and parameters[n].dim() == 2 else parameters[n], parameter)
        ]
        assert same, f"{weight} is no parameter of the module"
        original, flip = same[0]
        assert parameter.grad is not None
        expected = gradients[original]
        assert_close(parameter.grad, expected.T if flip and expected.dim() == 2 else expected, largest, weight)
        unmatched.discard(original)
    assert not unmatched


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left, right)


def test_fresh_parameters_merged_by_the_exporter_train_apart() -> None:
    """Fresh scales of layer normalization are all one and biases all zero; the export holds one tensor for all of them.

    The exporter's optimizer drops all-zero biases of matrix products; those are not in the file at all.
    """
    module, model = exported("gpt2", 18, optimize=True, random=False)
    net = onward.to_torch(model)
    gradients, largest = gradients_of(module, net, MODELS["gpt2"][1])
    found = [parameter.grad for parameter in net.weights.values() if parameter.dim() == 1]
    norms = {name: gradient for name, gradient in gradients.items() if ".ln_" in name}
    assert len(norms) == len(found) == 10
    assert {tuple(module.get_parameter(name).unique().tolist()) for name in norms} == {(0.0,), (1.0,)}
    for name, gradient in norms.items():
        assert min((g - gradient).abs().max().item() for g in found if g is not None) <= 1e-4 * largest, name


def test_export_compiles_whole_with_dynamic_shapes() -> None:
    """No graph break, no second compilation for another length; compiled and eager agree."""
    _, model = exported("gpt2", 18)
    net = onward.to_torch(model)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager")
    _, inputs, axes = MODELS["gpt2"]
    torch.testing.assert_close(compiled(*inputs), net(*inputs), rtol=1e-5, atol=1e-6)
    with torch._dynamo.config.patch(error_on_recompile=True):
        other = longer(inputs, axes)
        result = compiled(*other)
    torch.testing.assert_close(result, net(*other), rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(result.square().sum(), [net.weights["inner.transformer.wpe.weight"]])
    (expected,) = torch.autograd.grad(net(*other).square().sum(), [net.weights["inner.transformer.wpe.weight"]])
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)

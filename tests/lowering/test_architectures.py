"""Architectures of many families, exported by `torch.onnx.export`, compute and differentiate like the original module.

Each is compared as exported, where every parameter keeps its name, and after the exporter's optimizer, which renames,
transposes and folds. Bounds: outputs to 1e-4 of the largest; the gradient of every parameter to 1e-4 of its own
largest element or, where that is small, of a hundredth of the network's largest (a bias before a normalization has a
gradient of rounding errors only). What ONNX does not hold cannot be kept: `requires_grad=False`, `padding_idx`.
"""

from __future__ import annotations

import ast
import logging
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

import onward
from onward.lowering.building.tensor_facts import FACT
from onward.lowering.module import OnnxModule
from tests.lowering.architecture import Architecture, export_program
from tests.lowering.architectures import ARCHITECTURES, REFUSED
from tests.lowering.building.test_specialization import specialized
from tests.lowering.vision_models import randomize

pytest.importorskip("transformers")

RELATIVE = 1e-4
FLOOR = 1e-2


def _all(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _run(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs; random projections of all of them are differentiated."""
    module.zero_grad()
    outputs = _all(module(*inputs))
    generator = torch.Generator().manual_seed(1)
    loss = sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs)
    assert isinstance(loss, Tensor)
    loss.backward()
    return tuple(out.detach() for out in outputs)


def _assert_same_outputs(expected: tuple[Tensor, ...], actual: tuple[Tensor, ...]) -> None:
    assert len(expected) == len(actual)
    for left, right in zip(expected, actual, strict=True):
        assert left.shape == right.shape
        assert (left - right).abs().max() <= RELATIVE * left.abs().max()


def _assert_same_gradient(expected: Tensor, actual: Tensor | None, largest: float, name: str) -> float:
    """Returns the relative difference."""
    assert actual is not None, name
    scale = max(expected.abs().max().item(), FLOOR * largest)
    difference = (expected - actual).abs().max().item()
    assert difference <= RELATIVE * scale, f"{name}: {difference / scale:.1e}"
    return difference / max(scale, 1e-30)


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    """By every name that a parameter has."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def _assert_weights_are_parameters(module: nn.Module, net: OnnxModule, gradients: dict[str, Tensor]) -> float:
    """The weights are the parameters that get a gradient, each under one of its names, with the same gradient.

    Returns the largest relative difference of a gradient.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert set(net.weights) <= set(parameters)
    trained = [name for name in net.weights if parameters[name].requires_grad]
    assert len({parameters[name] for name in trained}) == len(trained)
    assert {parameters[name] for name in trained} == {parameters[name] for name in gradients}
    return max(_assert_same_gradient(gradients[name], net.weights[name].grad, largest, name) for name in trained)


def _folded_from(model: onnx.ModelProto, parameters: set[str]) -> dict[str, set[str]]:
    """Initializer -> the module's parameters that the exporter's optimizer says it computed it from."""
    found = {}
    for name, value in ir.from_proto(model).graph.initializers.items():
        sources = ast.literal_eval(value.metadata_props.get("pkg.onnxscript.optimizer.folded_from", "[]"))
        found[name] = parameters & set(sources)
    return found


def _arrangement(weight: Tensor, parameter: Tensor) -> str:
    """How a parameter is stored: as it is, transposed, in another shape; "" where the numbers are others."""
    if weight.numel() != parameter.numel():
        return ""
    if weight.shape == parameter.shape and torch.equal(weight, parameter):
        return "same"
    if parameter.dim() == 2 and weight.shape == parameter.T.shape and torch.equal(weight, parameter.T):
        return "transposed"
    return "reshaped" if torch.equal(weight.flatten(), parameter.flatten()) else ""


def _normalized(module: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())


def _assert_nothing_is_lost(
    module: nn.Module, net: OnnxModule, folded: dict[str, set[str]], gradients: dict[str, Tensor]
) -> None:
    """Every weight is a parameter, or computed from parameters; every parameter is a weight, or in one.

    Gradients are compared where a weight is a rearranged parameter that no other weight was computed from.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names: dict[Tensor, set[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(parameter, set()).add(name)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    accounted: set[str] = set()
    for weight, value in net.weights.items():
        sources = folded.get(weight, set()) or {weight.removesuffix("_bias")} & set(parameters)
        if not sources:
            sources = {name for name, p in parameters.items() if _arrangement(value, p)}
        assert sources, f"{weight} was computed from no parameter"
        accounted |= {alias for source in sources for alias in names[parameters[source]]}
        name = next(iter(sources))
        aliases = names[parameters[name]]
        shared = sum(
            bool(aliases & others) or other in aliases for other, others in folded.items() if other in net.weights
        )
        how = _arrangement(value, parameters[name])
        if len({parameters[source] for source in sources}) == 1 and shared == 1 and how and name in gradients:
            gradient = gradients[name].T if how == "transposed" else gradients[name].reshape(value.shape)
            _assert_same_gradient(gradient, value.grad, largest, weight)
    lost = {name for name in gradients if name not in accounted}
    # Batch normalization goes into the convolution before it, whose weight keeps its name.
    normalization = {
        f"{path}.{name}"
        for path, m in module.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
        for name in ("weight", "bias")
    }
    assert lost <= normalization, f"lost without a word: {sorted(lost - normalization)}"
    if lost:
        assert any("batch normalization was folded" in note for note in net.graph.notes)


def _assert_every_shape_is_known(net: OnnxModule, inputs: tuple[Tensor, ...]) -> None:
    """A program for inputs of these shapes notes the shape of every result: else its calls are not simplified."""
    calls = [node for node in specialized(net, *inputs).code.graph.nodes if node.op == "call_function"]
    assert not [node for node in calls if FACT not in node.meta]


def compare(architecture: Architecture) -> float:
    """Compares a module with its export, as it is and optimized; the largest relative difference of a gradient."""
    torch.manual_seed(0)
    module = randomize(architecture.make()).eval()
    expected = _run(module, architecture.inputs)
    gradients = _gradients(module)
    program = export_program(module, architecture)
    module.eval()

    net = onward.to_torch(program.model_proto)
    _assert_same_outputs(expected, _run(net, architecture.inputs))
    difference = _assert_weights_are_parameters(module, net, gradients)
    _assert_every_shape_is_known(net, architecture.inputs)

    program.optimize()
    model = program.model_proto
    net = onward.to_torch(model)
    _assert_same_outputs(expected, _run(net, architecture.inputs))
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    _assert_nothing_is_lost(module, net, _folded_from(model, parameters), gradients)
    return difference


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, id=a.name, marks=[pytest.mark.slow] if a.slow else []) for a in ARCHITECTURES],
)
def test_export_computes_and_differentiates_like_the_module(
    architecture: Architecture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    assert compare(architecture) <= RELATIVE


def test_table_is_wide() -> None:
    """At least 40 architectures of different names, over the opsets from 18 to 23, and reasons for what is missing."""
    assert len({a.name for a in ARCHITECTURES}) == len(ARCHITECTURES) >= 40
    assert {a.opset for a in ARCHITECTURES} == {18, 20, 21, 22, 23}
    assert all(REFUSED.values())

"""Weight updates as operators against torch's optimizers where these mean the same, else against the text's formula."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.errors import ModelError
from tests.one_node import make_model, run

# Attributes are float32: 0.9 is stored as 0.89999998.

DOMAIN = "ai.onnx.preview.training"


def _tensors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(count)]


def _run(op_type: str, attributes: dict, rate: float, updates: int, *tensors: torch.Tensor, outputs: int) -> tuple:
    given = [torch.tensor(rate, dtype=torch.float64), torch.tensor(updates), *tensors]
    inputs = {f"input_{index}": tensor for index, tensor in enumerate(given)}
    return run(make_model(op_type, inputs, attributes, 13, outputs, domain=DOMAIN), *given)


def test_momentum_is_torchs_sgd() -> None:
    """Three updates of two tensors, standard and Nesterov; from the second update on beta scales the gradient."""
    for mode in ("standard", "nesterov"):
        weights = [w.clone().requires_grad_() for w in _tensors(2)]
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=mode == "nesterov")
        values, momenta = [w.detach().clone() for w in weights], [torch.zeros(3, dtype=torch.float64)] * 2
        attributes = {"alpha": 0.9, "beta": 1.0, "mode": mode, "norm_coefficient": 0.01}
        for updates in range(3):
            gradients = [torch.cos(v) for v in values]
            results = _run("Momentum", attributes, 0.1, updates, *values, *gradients, *momenta, outputs=4)
            values, momenta = list(results[:2]), list(results[2:])
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            optimizer.step()
            for value, weight in zip(values, weights, strict=True):
                torch.testing.assert_close(value, weight.detach(), rtol=1e-6, atol=1e-8)


def test_beta_of_momentum_counts_from_the_second_update_on() -> None:
    x, g, v = _tensors(3)
    attributes = {"alpha": 0.9, "beta": 0.5, "mode": "standard", "norm_coefficient": 0.0}
    first = _run("Momentum", attributes, 0.1, 0, x, g, v, outputs=2)
    later = _run("Momentum", attributes, 0.1, 3, x, g, v, outputs=2)
    torch.testing.assert_close(first[1], 0.9 * v + g)
    torch.testing.assert_close(later[1], 0.9 * v + 0.5 * g)


def test_adagrad_is_torchs() -> None:
    weight = _tensors(1)[0].clone().requires_grad_()
    optimizer = torch.optim.Adagrad([weight], lr=0.1, lr_decay=0.05, weight_decay=0.01, eps=1e-6)
    value, squares = weight.detach().clone(), torch.zeros(3, dtype=torch.float64)
    attributes = {"decay_factor": 0.05, "norm_coefficient": 0.01, "epsilon": 1e-6}
    for updates in range(3):
        gradient = torch.cos(value)
        value, squares = _run("Adagrad", attributes, 0.1, updates, value, gradient, squares, outputs=2)
        weight.grad = gradient
        optimizer.step()
        torch.testing.assert_close(value, weight.detach(), rtol=1e-6, atol=1e-8)


def test_adam_is_torchs_up_to_where_epsilon_stands() -> None:
    """With epsilon 0 the standard's Adam and torch's agree; T counts updates from 1."""
    weight = _tensors(1)[0].clone().requires_grad_()
    optimizer = torch.optim.Adam([weight], lr=0.01, weight_decay=0.02, eps=0.0)
    value = weight.detach().clone()
    averages = squares = torch.zeros(3, dtype=torch.float64)
    attributes = {"norm_coefficient": 0.02, "epsilon": 0.0}
    for updates in range(1, 4):
        gradient = torch.cos(value)
        value, averages, squares = _run(
            "Adam", attributes, 0.01, updates, value, gradient, averages, squares, outputs=3
        )
        weight.grad = gradient
        optimizer.step()
        torch.testing.assert_close(value, weight.detach(), rtol=1e-6, atol=1e-8)


def test_adam_before_its_first_update_and_decay_afterwards() -> None:
    """No correction at T = 0; `norm_coefficient_post` shrinks the new value. Formula of the text."""
    x, g = _tensors(2)
    v = h = torch.zeros(3, dtype=torch.float64)
    attributes = {"norm_coefficient_post": 0.1, "epsilon": 0.5}
    result = _run("Adam", attributes, 0.01, 0, x, g, v, h, outputs=3)
    expected = 0.9 * (x - 0.01 * (0.1 * g) / (torch.sqrt(0.001 * g * g) + 0.5))
    torch.testing.assert_close(result[0], expected, rtol=1e-6, atol=1e-8)


def test_wrong_number_of_tensors_and_unknown_mode() -> None:
    x, g, v, h = _tensors(4)
    with pytest.raises(ModelError, match="5 tensors do not divide into equally many of values, gradients, averaged"):
        _run("Adam", {}, 0.1, 0, x, g, v, h, x, outputs=3)
    attributes = {"alpha": 0.9, "beta": 0.5, "mode": "heavy", "norm_coefficient": 0.0}
    with pytest.raises(ModelError, match="mode is 'heavy'; it must be standard or nesterov"):
        _run("Momentum", attributes, 0.1, 0, x, g, v, outputs=2)


def _differentiating_model(gradients: list[onnx.NodeProto], outputs: list[str]) -> onnx.ModelProto:
    """O = sum((tanh(X @ W + bias) * L)), W, X and L inputs, the bias stored."""
    nodes = [
        helper.make_node("MatMul", ["X", "W"], ["P"]),
        helper.make_node("Add", ["P", "bias"], ["S"]),
        helper.make_node("Tanh", ["S"], ["H"]),
        helper.make_node("Mul", ["H", "L"], ["M"]),
        helper.make_node("ReduceSum", ["M"], ["O"], keepdims=0),
        *gradients,
    ]
    graph = helper.make_graph(
        nodes,
        "differentiating",
        [
            helper.make_tensor_value_info(n, TensorProto.DOUBLE, s)
            for n, s in (("X", [2, 3]), ("W", [3, 4]), ("L", [4]))
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.linspace(-1, 1, 4), "bias")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13), helper.make_opsetid(DOMAIN, 1)])


def _values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 3), (3, 4), (4,))]


def _loss(X: torch.Tensor, W: torch.Tensor, L: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(X @ W + torch.linspace(-1, 1, 4, dtype=torch.float64)) * L).sum()


def test_gradients_as_operators_are_autograds() -> None:
    """With respect to inputs of the graph and to a value inside of it; also where autograd is switched off."""
    nodes = [
        helper.make_node("Gradient", ["X", "W", "L"], ["gX", "gW"], domain=DOMAIN, xs=["X", "W"], zs=["L"], y="O"),
        helper.make_node("Gradient", ["H", "L"], ["gH"], domain=DOMAIN, xs=["H"], zs=["L"], y="O"),
    ]
    values = [v.requires_grad_() for v in _values()]
    expected = torch.autograd.grad(_loss(*values), values[:2])
    net = onward.to_torch(_differentiating_model(nodes, ["O", "gX", "gW", "gH"]))
    with torch.no_grad():
        results = net(*values)
    torch.testing.assert_close(results[1:3], expected)
    torch.testing.assert_close(results[3], values[2].detach().expand(2, 4))
    assert list(net.weights) == ["bias"]


def test_gradients_by_stored_tensors() -> None:
    """Weights of the model among xs and zs: their values come in through the node's inputs."""
    nodes = [
        helper.make_node(
            "Gradient", ["bias", "X", "W", "L"], ["gB"], domain=DOMAIN, xs=["bias"], zs=["X", "W", "L"], y="O"
        ),
        helper.make_node(
            "Gradient", ["X", "bias", "W", "L"], ["gX"], domain=DOMAIN, xs=["X"], zs=["bias", "W", "L"], y="O"
        ),
    ]
    X, W, L = _values()
    bias = torch.linspace(-1, 1, 4, dtype=torch.float64, requires_grad=True)
    X.requires_grad_()
    expected = torch.autograd.grad((torch.tanh(X @ W + bias) * L).sum(), (bias, X))
    results = onward.to_torch(_differentiating_model(nodes, ["gB", "gX"]))(X, W, L)
    torch.testing.assert_close(tuple(results), expected)


def test_gradients_at_other_values_and_of_gradients() -> None:
    """The inputs of the node say where; a second Gradient differentiates the first; a loss of gradients trains."""
    nodes = [
        helper.make_node("Gradient", ["X", "W", "L"], ["gW"], domain=DOMAIN, xs=["W"], zs=["X", "L"], y="O"),
        helper.make_node("Gradient", ["W", "X", "L"], ["at"], domain=DOMAIN, xs=["W"], zs=["X", "L"], y="O"),
        helper.make_node("ReduceSumSquare", ["at"], ["norm"], keepdims=0),
        helper.make_node("Gradient", ["W", "X", "L"], ["second"], domain=DOMAIN, xs=["W"], zs=["X", "L"], y="norm"),
    ]
    values = [v.requires_grad_() for v in _values()]
    (first,) = torch.autograd.grad(_loss(*values), values[1:2], create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), values[1:2], create_graph=True)
    net = onward.to_torch(_differentiating_model(nodes[1:], ["at", "second"]))
    result = net(*values)
    torch.testing.assert_close(result[0], first)
    torch.testing.assert_close(result[1], second)
    torch.testing.assert_close(
        torch.autograd.grad(result[1].sum(), values[0], retain_graph=True),
        torch.autograd.grad(second.sum(), values[0], retain_graph=True),
    )
    swapped = _differentiating_model(
        [helper.make_node("Gradient", ["Z", "X", "L"], ["g"], domain=DOMAIN, xs=["W"], zs=["X", "L"], y="O")], ["g"]
    )
    swapped.graph.input.append(helper.make_tensor_value_info("Z", TensorProto.DOUBLE, [3, 4]))
    elsewhere = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(_loss(values[0], elsewhere, values[2]), elsewhere)
    torch.testing.assert_close(onward.to_torch(swapped)(*values, elsewhere), expected)


@pytest.mark.parametrize(
    ("inputs", "attributes", "words"),
    [
        (["W"], {"xs": ["W"], "y": "O"}, "'O' is not determined by xs and zs (W)"),
        (["W"], {"xs": ["W"], "y": "Q"}, "'Q' is not determined by xs and zs (W)"),
        (["W"], {"xs": ["W"]}, "must name the value `y` to differentiate"),
        (["W"], {"xs": ["W"], "zs": ["X"], "y": "O"}, "has 1 inputs for the 2 values of xs and zs"),
    ],
)
def test_borders_that_do_not_enclose(inputs: list[str], attributes: dict, words: str) -> None:
    node = helper.make_node("Gradient", inputs, ["g"], name="slope", domain=DOMAIN, **attributes)
    with pytest.raises(ModelError, match=re.escape("node 'slope' (Gradient)")) as caught:
        onward.to_torch(_differentiating_model([node], ["g"]))
    assert words in str(caught.value)

"""The update graph, run by onnxruntime, against torch's optimizers and against LAMB's formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from onward.artifacts.optimizer_graph import slot_names, write_optimizer_graph
from onward.errors import ModelError, ParametersError
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.parameters import AttributeRule, Optimizer
from tests.artifacts.plain_runtime import call, largest_error, open_session

RATES = (0.01, 0.02, 0.005, 0.01, 0.03)


def make_net() -> OnnxModule:
    model = create_model("mnist", variant="gemm", image_size=3, hidden=8, seed=3)
    return OnnxModule(make_training_graph(model))


def rule(**attributes: Any) -> AttributeRule:
    return AttributeRule(**attributes)


def is_bias(name: str) -> bool:
    return name.endswith("bias")


CASES: dict[str, tuple[Optimizer, Callable[[str, torch.Tensor], torch.optim.Optimizer]]] = {
    "SGD": (
        Optimizer(training_optimizer_name="SGDOptimizer", optimizer_attributes=(rule(lambda_=0.1),)),
        lambda name, weight: torch.optim.SGD([weight], weight_decay=0.1),
    ),
    "momentum": (
        Optimizer(
            training_optimizer_name="SGDOptimizer",
            optimizer_attributes=(rule(momentum=0.9), rule(weights="*bias", nesterov=True, lambda_=0.01)),
        ),
        lambda name, weight: torch.optim.SGD(
            [weight], momentum=0.9, nesterov=is_bias(name), weight_decay=0.01 if is_bias(name) else 0.0
        ),
    ),
    "Adam": (
        Optimizer(training_optimizer_name="Adam", optimizer_attributes=(rule(lambda_=0.1, alpha=0.8, epsilon=1e-6),)),
        lambda name, weight: torch.optim.Adam([weight], betas=(0.8, 0.999), weight_decay=0.1, eps=1e-6),
    ),
    "AdamW": (
        Optimizer(
            training_optimizer_name="AdamW",
            optimizer_attributes=(rule(lambda_=0.1, beta=0.95), rule(weights="*bias", lambda_=0.0)),
        ),
        lambda name, weight: torch.optim.AdamW([weight], betas=(0.9, 0.95), weight_decay=0.0 if is_bias(name) else 0.1),
    ),
}


def first_feeds(net: OnnxModule, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    feeds = {"update_count": torch.tensor(0)}
    for name, weight in net.weights.items():
        feeds[name] = weight.detach().clone()
        feeds |= {slot: torch.zeros_like(weight) for slot in slot_names(optimizer, name)}
    return feeds


def next_feeds(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removesuffix("_new"): tensor for name, tensor in results.items() if name.endswith("_new")}


def draw_gradients(net: OnnxModule, update: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(update)
    return {f"{name}_grad": torch.randn(w.shape, generator=generator) for name, w in net.weights.items()}


@pytest.mark.parametrize("name", CASES)
def test_five_updates_equal_those_of_torchs_optimizer(name: str, tmp_path: Path) -> None:
    optimizer, make = CASES[name]
    net = make_net()
    write_optimizer_graph(net, optimizer, tmp_path / "update.onnx")
    session = open_session(tmp_path / "update.onnx")
    weights = {n: w.detach().clone().requires_grad_() for n, w in net.weights.items()}
    torchs = {n: make(n, weight) for n, weight in weights.items()}
    feeds = first_feeds(net, optimizer)
    for update, rate in enumerate(RATES):
        gradients = draw_gradients(net, update)
        results = call(session, {**feeds, **gradients, "learning_rate": torch.tensor(rate)})
        for n, weight in weights.items():
            weight.grad = gradients[f"{n}_grad"].clone()
            torchs[n].param_groups[0]["lr"] = rate
            torchs[n].step()
            assert largest_error(results[f"{n}_new"], weight.detach()) < 1e-6
        feeds = next_feeds(results)
        assert int(feeds["update_count"]) == update + 1
    for n, weight in weights.items():
        for slot in slot_names(optimizer, n):
            stored = torchs[n].state[weight][slot.removeprefix(f"{n}_")]
            assert largest_error(feeds[slot], stored) < 1e-6


def test_lamb_follows_its_formula(tmp_path: Path) -> None:
    """You et al. 2020, algorithm 2, in float64; one bound of the ratio is in force for the biases."""
    rules = (rule(lambda_=0.01, do_bias_correction=True), rule(weights="*bias", ratio_max=0.5))
    optimizer = Optimizer(training_optimizer_name="Lamb", optimizer_attributes=rules)
    net = make_net()
    write_optimizer_graph(net, optimizer, tmp_path / "update.onnx")
    session = open_session(tmp_path / "update.onnx")
    feeds = first_feeds(net, optimizer)
    with torch.no_grad():
        for name in feeds:
            if name.endswith("bias"):
                feeds[name] += 1.0
    exact = {n: t.double() for n, t in feeds.items()}
    for update, rate in enumerate(RATES):
        gradients = draw_gradients(net, update)
        feeds = next_feeds(call(session, {**feeds, **gradients, "learning_rate": torch.tensor(rate)}))
        for n in net.weights:
            g = gradients[f"{n}_grad"].double()
            m = exact[f"{n}_exp_avg"] = 0.9 * exact[f"{n}_exp_avg"] + 0.1 * g
            v = exact[f"{n}_exp_avg_sq"] = 0.999 * exact[f"{n}_exp_avg_sq"] + 0.001 * g * g
            w, t = exact[n], update + 1
            d = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * w
            ratio = float(w.norm() / d.norm())
            exact[n] = w - rate * (min(ratio, 0.5) if is_bias(n) else ratio) * d
            assert largest_error(feeds[n], exact[n].float()) < 2e-6


def test_gradients_are_clipped_to_the_global_norm_as_torch_does(tmp_path: Path) -> None:
    optimizer = Optimizer(training_optimizer_name="SGDOptimizer", max_norm_clip=0.5)
    net = make_net()
    write_optimizer_graph(net, optimizer, tmp_path / "update.onnx")
    gradients = draw_gradients(net, 0)
    feeds = {**first_feeds(net, optimizer), **gradients, "learning_rate": torch.tensor(0.1)}
    results = call(open_session(tmp_path / "update.onnx"), feeds)
    weights = {n: w.detach().clone().requires_grad_() for n, w in net.weights.items()}
    for n, weight in weights.items():
        weight.grad = gradients[f"{n}_grad"].clone()
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
    torch.optim.SGD(weights.values(), lr=0.1).step()
    assert float(norm) > 0.5
    assert float(results["gradient_norm"]) == pytest.approx(float(norm), rel=1e-6)
    for n, weight in weights.items():
        assert largest_error(results[f"{n}_new"], weight.detach()) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, tmp_path: Path) -> None:
    optimizer = CASES["AdamW"][0]
    net = make_net()
    write_optimizer_graph(net, optimizer, tmp_path / "update.onnx")
    feeds = {**first_feeds(net, optimizer), **draw_gradients(net, 0), "learning_rate": torch.tensor(0.1)}
    feeds["fc2.bias_grad"][1] = bad
    results = next_feeds(call(open_session(tmp_path / "update.onnx"), feeds))
    for name, tensor in results.items():
        assert torch.equal(tensor, feeds[name]), name


def test_the_model_is_valid_and_of_the_standard_alone(tmp_path: Path) -> None:
    write_optimizer_graph(make_net(), CASES["Adam"][0], tmp_path / "update.onnx")
    model = onnx.load(tmp_path / "update.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 18)]
    assert {node.domain for node in model.graph.node} == {""}
    assert model.ir_version <= 10


def test_double_weights_are_updated_in_double(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 3))
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> g (double[2, 3] x) => (double[2, 4] y) {
            wt = Transpose(w)
            y = MatMul(x, wt)
        }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    net = OnnxModule(make_training_graph(ir.from_proto(model)))
    optimizer = Optimizer(training_optimizer_name="Adam")
    write_optimizer_graph(net, optimizer, tmp_path / "update.onnx")
    gradient = torch.randn(4, 3, dtype=torch.float64)
    # 2**-7 is the same number in float32, in which the learning rate comes.
    feeds = {**first_feeds(net, optimizer), "w_grad": gradient, "learning_rate": torch.tensor(2.0**-7)}
    results = call(open_session(tmp_path / "update.onnx"), feeds)
    expected = torch.from_numpy(weight).requires_grad_()
    expected.grad = gradient
    torch.optim.Adam([expected], lr=2.0**-7).step()
    assert largest_error(results["w_new"], expected.detach()) < 1e-14


def test_names_that_clash_are_named(tmp_path: Path) -> None:
    model = create_model("mnist", variant="gemm", image_size=3, hidden=8)
    model.graph.initializers["fc1.weight"].name = "fc1.bias_grad"
    net = OnnxModule(make_training_graph(model))
    with pytest.raises(ModelError, match=r"the name 'fc1\.bias_grad' twice.*Rename it in the model"):
        write_optimizer_graph(net, CASES["SGD"][0], tmp_path / "update.onnx")


def test_nesterov_without_momentum_is_refused(tmp_path: Path) -> None:
    optimizer = Optimizer(training_optimizer_name="SGDOptimizer", optimizer_attributes=(rule(nesterov=True),))
    with pytest.raises(ParametersError, match="nesterov is true while momentum is 0; set a momentum"):
        write_optimizer_graph(make_net(), optimizer, tmp_path / "update.onnx")

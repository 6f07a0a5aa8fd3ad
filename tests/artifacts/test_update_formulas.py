"""The formulas of update graphs, run by onnxruntime, against torch's optimizers and against LAMB's formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onward.artifacts.optimizer_graph import slot_shapes, write_optimizer_graph
from onward.optim.lion import Lion
from onward.optim.schedule_free import AdamWScheduleFree
from onward.parameters import Optimizer
from tests.artifacts.plain_runtime import call, largest_error, open_session
from tests.artifacts.test_optimizer_graph import RATES, draw_gradients, first_feeds, make_net, next_feeds, rule


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
    "Lion": (
        Optimizer(training_optimizer_name="Lion", optimizer_attributes=(rule(lambda_=0.1, alpha=0.8, beta=0.95),)),
        lambda name, weight: Lion([weight], {"lr": 0.0, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    ),
    "Schedule-Free": (
        Optimizer(
            training_optimizer_name="AdamWScheduleFree",
            optimizer_attributes=(rule(lambda_=0.1, alpha=0.8), rule(weights="*bias", lambda_=0.0)),
        ),
        lambda name, weight: AdamWScheduleFree(
            [weight], {"lr": 0.0, "betas": (0.8, 0.999), "eps": 1e-8, "weight_decay": 0.0 if is_bias(name) else 0.1}
        ),
    ),
    "Adafactor": (
        Optimizer(
            training_optimizer_name="Adafactor",
            optimizer_attributes=(rule(lambda_=0.1, epsilon=1e-6, min_scale=0.01, beta2_decay=-0.7),),
        ),
        lambda name, weight: torch.optim.Adafactor([weight], eps=(1e-6, 0.01), beta2_decay=-0.7, weight_decay=0.1),
    ),
    "Muon": (
        Optimizer(
            training_optimizer_name="Muon",
            optimizer_attributes=(rule(lambda_=0.1, momentum=0.9), rule(weights="*weight", use_muon=True)),
        ),
        lambda name, weight: (
            torch.optim.AdamW([weight], weight_decay=0.1)
            if is_bias(name)
            else torch.optim.Muon([weight], momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_five_updates_equal_those_of_torchs_optimizer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-6: torch's Muon iterates in bf16, unless it is made to iterate in float32 as the graph does."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
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
            if isinstance(torchs[n], AdamWScheduleFree):
                assert largest_error(results[f"{n}_average"], torchs[n].average_of(weight)) < 1e-6
        feeds = next_feeds(results)
        assert int(feeds["update_count"]) == update + 1
    for n, weight in weights.items():
        for slot in slot_shapes(optimizer, n, weight.shape):
            if slot == f"{n}_z_offset":
                assert largest_error(feeds[slot] + feeds[n], torchs[n].state[weight]["z"]) < 1e-6
                continue
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

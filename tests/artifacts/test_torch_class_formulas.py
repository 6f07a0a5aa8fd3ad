"""Updates of classes of torch.optim, run by onnxruntime, against torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onward.artifacts.optimizer_graph import slot_shapes, write_optimizer_graph
from onward.optimizers.registry import OPTIMIZERS
from onward.parameters import Optimizer
from tests.artifacts.plain_runtime import call, largest_error, open_session
from tests.artifacts.test_optimizer_graph import draw_gradients, first_feeds, make_net, next_feeds, rule

RATES = (0.01, 0.02, 0.005, 0.01, 0.03, 0.01, 0.002, 0.01, 0.004, 0.01)
CLASSES = [kind.name for kind in OPTIMIZERS if kind.name.startswith("torch.")]
BETAS = {"betas": [0.8, 0.95]}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "torch.optim.ASGD": ({"lambd": 0.1, "alpha": 0.5, "t0": 3.0, "weight_decay": 0.1},),
    "torch.optim.Adadelta": ({"rho": 0.7, "eps": 1e-4, "weight_decay": 0.1},),
    "torch.optim.Adagrad": ({"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-4},),
    "torch.optim.Adam": ({**BETAS, "amsgrad": True, "weight_decay": 0.1}, {"decoupled_weight_decay": True}),
    "torch.optim.AdamW": ({**BETAS, "amsgrad": True, "weight_decay": 0.1, "eps": 1e-3},),
    "torch.optim.Adamax": ({**BETAS, "eps": 1e-2, "weight_decay": 0.1},),
    "torch.optim.NAdam": (
        {**BETAS, "momentum_decay": 0.1, "weight_decay": 0.1},
        {"decoupled_weight_decay": True, "weight_decay": 0.1, "eps": 1e-3},
    ),
    "torch.optim.RAdam": (
        {**BETAS, "weight_decay": 0.1, "decoupled_weight_decay": True, "eps": 1e-3},
        {"betas": [0.9, 0.6], "weight_decay": 0.1},
    ),
    "torch.optim.RMSprop": (
        {"alpha": 0.8, "momentum": 0.9, "centered": True, "weight_decay": 0.1, "eps": 1e-4},
        {"centered": True, "eps": 1e-3},
    ),
    "torch.optim.Rprop": ({"etas": [0.3, 1.5], "step_sizes": [0.005, 0.02]},),
}
CASES = [(name, options) for name in CLASSES for options in ({}, *OPTIONS[name])]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_ten_updates_equal_those_of_torch(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Biases learn at half of the rate; the state is torch's, too."""
    rules = (rule(options=options), rule(weights="*bias", learning_rate_factor=0.5))
    optimizer = Optimizer(training_optimizer_name=name, optimizer_attributes=rules)
    net = make_net()
    write_optimizer_graph(net, optimizer, tmp_path / "update.onnx")
    session = open_session(tmp_path / "update.onnx")
    weights = {n: w.detach().clone().requires_grad_() for n, w in net.weights.items()}
    factors = {n: 0.5 if n.endswith("bias") else 1.0 for n in weights}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    kind = getattr(torch.optim, name.removeprefix("torch.optim."))
    torchs = {n: kind([w], lr=RATES[0] * factors[n], **given) for n, w in weights.items()}
    feeds = first_feeds(net, optimizer)
    for update, rate in enumerate(RATES):
        gradients = draw_gradients(net, update)
        feeds = next_feeds(call(session, {**feeds, **gradients, "learning_rate": torch.tensor(rate)}))
        for n, weight in weights.items():
            weight.grad = gradients[f"{n}_grad"].clone()
            torchs[n].param_groups[0]["lr"] = rate * factors[n]
            torchs[n].step()
            assert largest_error(feeds[n], weight.detach()) < 1e-6, (n, update)
    for n, weight in weights.items():
        slots = slot_shapes(optimizer, n, weight.shape)
        stored = {slot: value for slot, value in torchs[n].state[weight].items() if slot != "step"}
        assert {slot.removeprefix(f"{n}_") for slot in slots} == stored.keys()
        for slot, value in stored.items():
            assert feeds[f"{n}_{slot}"].shape == value.shape
            assert largest_error(feeds[f"{n}_{slot}"], value) < 2e-6, slot


def test_radam_keeps_its_digits_over_thousands_of_updates(tmp_path: Path) -> None:
    """Its rectification is a difference of numbers near 2,000, which float32 would round to 1e-4."""
    optimizer = Optimizer(training_optimizer_name="torch.optim.RAdam")
    net = make_net()
    write_optimizer_graph(net, optimizer, tmp_path / "update.onnx")
    session = open_session(tmp_path / "update.onnx")
    gradients = draw_gradients(net, 0)
    for before in (5, 6, 7, 50, 998, 1005, 40_000):
        feeds = {name: torch.ones_like(value) for name, value in first_feeds(net, optimizer).items()}
        feeds |= {name: torch.zeros_like(value) for name, value in feeds.items() if name in net.weights}
        feeds["update_count"] = torch.tensor(before)
        results = call(session, {**feeds, **gradients, "learning_rate": torch.tensor(1.0)})
        for n in net.weights:
            weight = torch.zeros(feeds[n].shape, requires_grad=True)
            weight.grad = gradients[f"{n}_grad"].clone()
            own = torch.optim.RAdam([weight], lr=1.0)
            ones = torch.ones_like(weight)
            own.state[weight] = {"step": torch.tensor(float(before)), "exp_avg": ones, "exp_avg_sq": ones.clone()}
            own.step()
            assert largest_error(results[f"{n}_new"], weight.detach()) < 1e-6, before

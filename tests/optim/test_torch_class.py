"""Optimizers of torch.optim by name: the bits that torch computes, whole or in shards, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onward.errors import ParametersError
from onward.optim.building import make_optimizer, set_learning_rate, slots_by_name
from onward.optimizers.registry import OPTIMIZERS
from tests.optim.peers import UPDATES, give_gradients, optimizer_of, weights

NAMES = [kind.name for kind in OPTIMIZERS if kind.name.startswith("torch.optim.")]
OPTIONS: dict[str, dict[str, Any]] = {
    "ASGD": {"lambd": 0.01, "t0": 5.0, "weight_decay": 0.1},
    "Adam": {"amsgrad": True, "betas": [0.8, 0.95]},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "NAdam": {"momentum_decay": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "Rprop": {"etas": [0.4, 1.3]},
}


def class_of(name: str) -> Any:
    return getattr(torch.optim, name.rpartition(".")[2])


def options_of(name: str) -> dict[str, Any]:
    return OPTIONS.get(name.rpartition(".")[2], {})


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_as_torch(name: str) -> None:
    """Weights and state after 20 updates, with the options of a rule and another factor for one weight."""
    rules = [{"options": options_of(name)}, {"weights": "scale", "learning_rate_factor": 0.5}]
    ours, theirs = weights(), weights()
    optimizer = make_optimizer(optimizer_of(name, rules), ours, initial_lr=0.01)
    before = {key: set(slots) for key, slots in slots_by_name(optimizer, ours).items()}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options_of(name).items()}
    groups = [{"params": [weight], "lr": 0.005 if key == "scale" else 0.01} for key, weight in theirs.items()]
    peer = class_of(name)(groups, **options)
    for step in range(UPDATES):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        set_learning_rate(optimizer, 0.01)
        optimizer.step()
        peer.step()
    for key, weight in theirs.items():
        assert torch.equal(ours[key], weight), key
        found, expected = optimizer.state[ours[key]], peer.state[weight]
        assert before[key] == set(found) == set(expected)
        assert all(torch.equal(found[slot], expected[slot]) for slot in expected)


@pytest.mark.parametrize("name", NAMES)
def test_it_updates_element_by_element(name: str) -> None:
    """The halves of a weight, each updated by itself as ranks do, are the whole updated at once, in every bit."""
    whole = torch.nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
    halves = [torch.nn.Parameter(half.detach().clone()) for half in whole.chunk(2)]
    settings = optimizer_of(name, [{"options": options_of(name)}])
    one = make_optimizer(settings, {"w": whole}, initial_lr=0.01)
    two = make_optimizer(settings, {"a": halves[0], "b": halves[1]}, initial_lr=0.01)
    for step in range(5):
        gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        whole.grad = gradient
        halves[0].grad, halves[1].grad = gradient.chunk(2)
        for optimizer in (one, two):
            set_learning_rate(optimizer, 0.01)
            optimizer.step()
    assert torch.equal(whole, torch.cat(halves))


def test_options_of_several_rules_add_up() -> None:
    rules = [{"options": {"eps": 1e-4, "weight_decay": 0.1}}, {"weights": "scale", "options": {"weight_decay": 0.0}}]
    optimizer = make_optimizer(optimizer_of("torch.optim.RAdam", rules), weights())
    assert sorted((g["eps"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups) == [
        (1e-4, 0.0, 1),
        (1e-4, 0.1, 4),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"momentum_decays": 0.1},
            r"options\.momentum_decays is unknown to torch\.optim\.NAdam\. Did you mean 'momentum_decay'\? It has",
        ),
        ({"lr": 0.1}, r"options\.lr is unknown to torch\.optim\.NAdam\.* It has: betas, eps"),
        ({"eps": -1.0}, r"torch\.optim\.NAdam refuses these options: Invalid epsilon value: -1\.0\. Change them\."),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParametersError, match=words):
        make_optimizer(optimizer_of("torch.optim.NAdam", [{"options": options}]), weights())


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "SGD"])
def test_classes_that_are_not_taken(name: str) -> None:
    with pytest.raises(ParametersError, match=f"is 'torch.optim.{name}'; expected 'SGDOptimizer', 'Adam', 'AdamW', "):
        optimizer_of(f"torch.optim.{name}")

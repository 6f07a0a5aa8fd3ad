"""From rules to a torch optimizer: which weight gets what, and the same bits as an optimizer of torch's own making."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onward.errors import ParametersError
from onward.optim.building import (
    attributes_of_weight,
    make_optimizer,
    set_learning_rate,
    slots_by_name,
    unmatched_rules,
)
from onward.optim.lamb import Lamb
from tests.optim.peers import SHAPES, give_gradients, optimizer_of, weights

# --------------------------------------------------------------------------------------------------------------- rules


def test_later_rules_win() -> None:
    rules = [
        {"weights": "*", "lambda": 0.1, "alpha": 0.8},
        {"weights": ["*bias*", "*norm*"], "lambda": 0.0},
        {"weights": "h.0.*", "beta": 0.9},
        {"weights": "norm.weight", "lambda": 0.3},
    ]
    parameters = optimizer_of("AdamW", rules)
    found = {name: attributes_of_weight(parameters, name) for name in SHAPES}
    assert {name: a["lambda"] for name, a in found.items()} == {
        "h.0.weight": 0.1, "h.0.bias": 0.0, "norm.weight": 0.3, "scale": 0.1, "a[0]/w": 0.1,
    }  # fmt: skip
    assert {name: a["beta"] for name, a in found.items()} == {
        "h.0.weight": 0.9, "h.0.bias": 0.9, "norm.weight": 0.999, "scale": 0.999, "a[0]/w": 0.999,
    }  # fmt: skip
    assert all(a["alpha"] == 0.8 and a["epsilon"] == 1e-8 for a in found.values())
    given = weights()
    optimizer = make_optimizer(parameters, given)
    names = {id(weight): name for name, weight in given.items()}
    groups = [sorted(names[id(weight)] for weight in group["params"]) for group in optimizer.param_groups]
    assert sorted(groups) == [["a[0]/w", "scale"], ["h.0.bias"], ["h.0.weight"], ["norm.weight"]]
    for group in optimizer.param_groups:
        for weight in group["params"]:
            attributes = found[names[id(weight)]]
            assert group["weight_decay"] == attributes["lambda"]
            assert group["betas"] == (0.8, attributes["beta"])


def test_a_name_with_brackets_means_itself() -> None:
    parameters = optimizer_of("AdamW", [{"weights": "a[0]/w", "lambda": 0.5}])
    assert attributes_of_weight(parameters, "a[0]/w")["lambda"] == 0.5
    assert unmatched_rules(parameters, weights()) == []


def test_rules_that_match_nothing_are_found() -> None:
    parameters = optimizer_of(
        "AdamW", [{"weights": ["*", "*.gamma"], "lambda": 0.1}, {"weights": "hh*", "lambda": 1.0}]
    )
    assert unmatched_rules(parameters, weights()) == ["*.gamma", "hh*"]
    assert unmatched_rules(optimizer_of("AdamW", lambda name: {}), weights()) == []


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, r"returned None; expected a dictionary like \{\"lambda\": 0\.01\}, or \{\} for the defaults\."),
        ([("lambda", 0.1)], r"returned \[\('lambda', 0\.1\)\]; expected a dictionary"),
        ({1: 0.1}, r"returned \{1: 0\.1\}; expected a dictionary"),
        ({"lambda": -0.1}, r"returned what is wrong: lambda is -0\.1; expected .*0"),
        ({"lambda": "0.1"}, r"lambda is '0\.1'; expected"),
        ({"lambda": float("nan")}, r"lambda is nan; expected"),
        ({"beta": 1.5}, r"beta is 1\.5; expected"),
        ({"epsilon": [1e-8]}, r"epsilon is \[1e-08\]; expected"),
        ({"learning_rate_factor": -1.0}, r"learning_rate_factor is -1\.0; expected"),
        ({"do_bias_correction": "yes"}, r"do_bias_correction is 'yes'; expected"),
        ({"ratio_min": 2.0, "ratio_max": 1.0}, r"contradict: ratio_min is 2, above ratio_max, which is 1\."),
        ({"weight_decay": 0.1}, r"returned weight_decay; Lamb has: alpha, beta"),
        ({"weights": "*"}, r"returned weights; Lamb has: alpha, beta"),
    ],
)
def test_what_a_function_returns_is_checked_as_rules_are(returned: Any, words: str) -> None:
    with pytest.raises(ParametersError, match=r"^optimizer_attributes\('.*'\) " + f".*{words}"):
        make_optimizer(optimizer_of("Lamb", lambda name: returned), weights())


def test_defaults_of_each_optimizer() -> None:
    assert attributes_of_weight(optimizer_of("Lamb"), "w")["epsilon"] == 1e-6
    assert attributes_of_weight(optimizer_of("Lamb"), "w")["do_bias_correction"] is False
    assert attributes_of_weight(optimizer_of("Adam"), "w")["do_bias_correction"] is True
    assert attributes_of_weight(optimizer_of("SGDOptimizer"), "w")["momentum"] == 0.0


def test_attributes_from_a_function() -> None:
    parameters = optimizer_of("AdamW", lambda name: {"lambda": 0.0 if "bias" in name else 0.2})
    optimizer = make_optimizer(parameters, weights())
    assert sorted((group["weight_decay"], len(group["params"])) for group in optimizer.param_groups) == [
        (0.0, 1),
        (0.2, 4),
    ]
    numbers = optimizer_of("AdamW", lambda name: {"lambda_": np.float32(0.5), "alpha": torch.tensor(0.25)})
    assert {(g["weight_decay"], g["betas"][0]) for g in make_optimizer(numbers, weights()).param_groups} == {
        (0.5, 0.25)
    }
    wrong = optimizer_of("AdamW", lambda name: {"momentum": 0.9, "lambda": 0.0})
    with pytest.raises(
        ParametersError, match=r"optimizer_attributes\('h.0.weight'\) returned momentum; AdamW has: alpha"
    ):
        make_optimizer(wrong, weights())


def test_combinations_that_no_optimizer_has() -> None:
    with pytest.raises(ParametersError, match="nesterov is true while momentum is 0; set a momentum"):
        make_optimizer(optimizer_of("SGDOptimizer", lambda name: {"nesterov": True}), weights())


# ------------------------------------------------------------------------------------------------------ the same bits

PEERS: dict[str, tuple[str, dict[str, Any], Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
    "sgd": ("SGDOptimizer", {}, lambda p: torch.optim.SGD(p, lr=0.1, fused=True)),
    "sgd with decay": (
        "SGDOptimizer",
        {"lambda": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    ),
    "momentum": ("SGDOptimizer", {"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)),
    "nesterov": (
        "SGDOptimizer",
        {"momentum": 0.9, "nesterov": True},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    ),
    "adam": (
        "Adam",
        {"alpha": 0.8, "beta": 0.95, "lambda": 0.1, "epsilon": 1e-6},
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, fused=True),
    ),
    "adamw": (
        "AdamW",
        {"alpha": 0.8, "beta": 0.95, "lambda": 0.1, "epsilon": 1e-6},
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, fused=True),
    ),
    "lamb": (
        "Lamb",
        {"alpha": 0.8, "beta": 0.95, "lambda": 0.1, "ratio_max": 5.0},
        lambda p: Lamb(p, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, ratio_max=5.0),
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_slots_from_the_start_change_no_bit(name: str) -> None:
    """Five steps next to a fresh optimizer of torch: weights and moments equal in every bit."""
    kind, attributes, make = PEERS[name]
    ours, theirs = weights(), weights()
    optimizer = make_optimizer(optimizer_of(kind, [{"weights": "*", **attributes}]), ours)
    before = {slot: set(tensors) for slot, tensors in slots_by_name(optimizer, ours).items()}
    peer = make(list(theirs.values()))
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        set_learning_rate(optimizer, 0.1)
        optimizer.step()
        peer.step()
    for key in SHAPES:
        assert torch.equal(ours[key], theirs[key]), key
        state = {k: v for k, v in peer.state[theirs[key]].items() if v is not None}
        assert state.keys() == optimizer.state[ours[key]].keys() == before[key]
        for slot, value in state.items():
            found = optimizer.state[ours[key]][slot]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(found)), (key, slot)
            assert torch.as_tensor(found).dtype == torch.float32


def test_slots_are_there_before_the_first_step() -> None:
    given = weights()
    slots = slots_by_name(make_optimizer(optimizer_of("Adam"), given), given)
    assert list(slots) == list(SHAPES)
    for name, found in slots.items():
        assert set(found) == {"step", "exp_avg", "exp_avg_sq"}
        assert found["exp_avg"].shape == given[name].shape
        assert all(not tensor.any() for tensor in found.values())
    assert all(not s for s in slots_by_name(make_optimizer(optimizer_of("SGDOptimizer"), given), given).values())


def test_learning_rate_factor() -> None:
    """A tenth of the rate moves a weight a tenth as far; a factor of 0 freezes it."""
    rules = [{"weights": "h.0.bias", "learning_rate_factor": 0.1}, {"weights": "scale", "learning_rate_factor": 0.0}]
    given, start = weights(), weights()
    optimizer = make_optimizer(optimizer_of("SGDOptimizer", rules), given)
    give_gradients(given, 0)
    set_learning_rate(optimizer, 0.5)
    optimizer.step()
    for name, weight in given.items():
        factor = {"h.0.bias": 0.1, "scale": 0.0}.get(name, 1.0)
        torch.testing.assert_close(weight.detach(), start[name].detach() - 0.5 * factor * weight.grad)
    assert torch.equal(given["scale"], start["scale"])


def test_a_state_dict_goes_back_and_forth() -> None:
    """As checkpoints load it: into slots that are there already."""
    given = weights()
    optimizer = make_optimizer(optimizer_of("AdamW"), given)
    set_learning_rate(optimizer, 0.1)
    give_gradients(given, 0)
    optimizer.step()
    other = make_optimizer(optimizer_of("AdamW"), weights())
    other.load_state_dict(optimizer.state_dict())
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(one[slot], two[slot]) for slot in one)

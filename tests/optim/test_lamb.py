"""LAMB against its formula written out in numpy for one tensor, and what torch expects of an optimizer."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from onward.optim.lamb import Lamb

SHAPES = [(7, 5), (11,), (), (3, 2, 2), (4,)]


class FormulaOfLamb:
    """Algorithm 2 of arXiv 1904.00962 for one weight, in float64, step by step."""

    def __init__(self, weight: np.ndarray, **options: Any) -> None:
        self.w = weight.astype(np.float64)
        self.m = np.zeros_like(self.w)
        self.v = np.zeros_like(self.w)
        self.t = 0
        self.o = options

    def update(self, g: np.ndarray) -> None:
        beta1, beta2 = self.o["betas"]
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * np.square(g)
        corrects = self.o["do_bias_correction"]
        m_hat = self.m / (1 - beta1**self.t) if corrects else self.m
        v_hat = self.v / (1 - beta2**self.t) if corrects else self.v
        d = m_hat / (np.sqrt(v_hat) + self.o["eps"]) + self.o["weight_decay"] * self.w
        norm_w, norm_d = np.sqrt(np.square(self.w).sum()), np.sqrt(np.square(d).sum())
        ratio = 1.0
        if norm_w > 0 and norm_d > 0:
            ratio = min(max(norm_w / norm_d, self.o["ratio_min"]), self.o["ratio_max"])
        self.w = self.w - self.o["lr"] * ratio * d


def initial(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Weights of many shapes; the last one all zeros."""
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    tensors[-1].zero_()
    return [torch.nn.Parameter(tensor) for tensor in tensors]


DEFAULTS: dict[str, Any] = {
    "lr": 0.01,
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.0,
    "ratio_min": -math.inf,
    "ratio_max": math.inf,
    "do_bias_correction": False,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "do_bias_correction": True},
        {"betas": (0.8, 0.95), "eps": 1e-3, "lr": 0.1},
        {"ratio_min": 0.05, "ratio_max": 0.5, "weight_decay": 0.01, "do_bias_correction": True},
        {"ratio_min": 3.0},
    ],
)
def test_20_updates_equal_the_formula(options: dict[str, Any], dtype: torch.dtype) -> None:
    """To 1e-6 of every weight's norm in float32, 1e-12 in float64; a zero weight and zero gradients among them."""
    options = DEFAULTS | options
    weights = initial(dtype)
    optimizer = Lamb(weights, **options)
    formulas = [FormulaOfLamb(weight.detach().numpy(), **options) for weight in weights]
    generator = torch.Generator().manual_seed(5)
    for update in range(20):
        for index, (weight, formula) in enumerate(zip(weights, formulas, strict=True)):
            gradient = torch.randn(weight.shape, generator=generator).to(dtype)
            if index == 1 and update < 3:
                gradient = torch.zeros_like(gradient)
            weight.grad = gradient
            formula.update(gradient.numpy().astype(np.float64))
        optimizer.step()
    bound = 1e-6 if dtype == torch.float32 else 1e-12
    for weight, formula in zip(weights, formulas, strict=True):
        assert np.linalg.norm(weight.detach().numpy() - formula.w) <= bound * np.linalg.norm(formula.w)


def test_the_ratio_is_1_where_a_norm_is_zero() -> None:
    """A zero weight moves by lr * d itself; a zero direction leaves the weight, and nothing becomes NaN."""
    zero, still = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4))
    optimizer = Lamb([zero, still], lr=0.5, eps=0.0, betas=(0.0, 0.0), ratio_max=1e-3)
    zero.grad = torch.full((4,), 2.0)
    still.grad = torch.zeros(4)
    optimizer.param_groups[0]["eps"] = 1e-6
    optimizer.step()
    assert zero.tolist() == pytest.approx([-0.5] * 4, abs=1e-6)
    assert still.tolist() == [1.0] * 4


def test_groups_have_their_own_options_and_weights_without_gradient_rest() -> None:
    a, b, c = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = Lamb([{"params": [a], "lr": 0.0}, {"params": [b, c], "weight_decay": 0.1}], lr=0.1)
    a.grad, b.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    assert a.tolist() == c.tolist() == [1.0] * 3
    assert b.tolist() == pytest.approx([0.9] * 3, abs=1e-6)
    assert not any(slot.any() for slot in optimizer.state[c].values())
    assert {name: (v.dtype, v.shape) for name, v in optimizer.state[b].items()} == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.float32, (3,)),
        "exp_avg_sq": (torch.float32, (3,)),
    }


def test_a_restored_state_goes_on_bit_for_bit() -> None:
    """state_dict and load_state_dict in the middle of ten updates."""

    def train(weights: list[torch.nn.Parameter], optimizer: Lamb, updates: range) -> None:
        for update in updates:
            generator = torch.Generator().manual_seed(update)
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()

    weights = initial()
    optimizer = Lamb(weights, do_bias_correction=True, weight_decay=0.1)
    train(weights, optimizer, range(5))
    others = copy.deepcopy(weights)
    other = Lamb(others, lr=77.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(weights, optimizer, range(5, 10))
    train(others, other, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_a_closure_is_called_and_its_loss_returned() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = Lamb([weight], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 9.0
    assert weight.item() < 3.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr is -1.0; expected 0 or more"),
        ({"betas": (0.9, 1.0)}, "betas are 0.9 and 1; expected both from 0 up to, not including, 1"),
        ({"ratio_min": 2.0, "ratio_max": 1.0}, "ratio_min 2.0 is above ratio_max 1.0"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Lamb([torch.nn.Parameter(torch.ones(1))], **options)


def test_weights_of_low_precision_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a weight of torch.bfloat16; Lamb updates float32 masters"):
        Lamb([torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))])

"""Schedules against torch's own schedulers strung together, against the formulas of ONNX Runtime's runner, and at their
ends."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    PolynomialLR,
    SequentialLR,
)

from onward.optim.schedules import LearningRateSchedule, factor
from onward.parameters import LearningRate
from onward.schedules.learning_rate.polynomial import POLYNOMIAL
from onward.schedules.learning_rate.registry import decay_named

STEPS = 50
MODES = ["none", "constant", "linear", "polynomial", "cosine", "wsd"]


def rates_of_torch(after: Callable[[torch.optim.Optimizer, int], LRScheduler], warmup_steps: int) -> list[float]:
    """The learning rates of a linear warm-up from 1/W to 1 at step W, then another scheduler of torch's."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    # torch counts from 0 what onward counts from 1.
    milestone = warmup_steps - 1
    warmup = LinearLR(optimizer, start_factor=1 / warmup_steps, end_factor=1.0, total_iters=milestone)
    scheduler = SequentialLR(optimizer, [warmup, after(optimizer, STEPS - warmup_steps)], milestones=[milestone])
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(STEPS):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return rates


@pytest.mark.parametrize("warmup_steps", [2, 10, 49])
@pytest.mark.parametrize(
    ("mode", "power", "after"),
    [
        ("constant", 0.5, lambda optimizer, left: ConstantLR(optimizer, factor=1.0, total_iters=left)),
        ("linear", 0.5, lambda optimizer, left: LinearLR(optimizer, 1.0, 0.0, total_iters=left)),
        ("polynomial", 0.5, lambda optimizer, left: PolynomialLR(optimizer, total_iters=left, power=0.5)),
        ("polynomial", 2.0, lambda optimizer, left: PolynomialLR(optimizer, total_iters=left, power=2.0)),
        ("cosine", 0.5, lambda optimizer, left: CosineAnnealingLR(optimizer, T_max=left)),
    ],
)
def test_equal_to_torch_s_schedulers(
    mode: str, power: float, after: Callable[[torch.optim.Optimizer, int], LRScheduler], warmup_steps: int
) -> None:
    """To 1e-12 of the highest rate: torch multiplies rate by rate and so rounds a little."""
    rate = LearningRate(initial_lr=0.3, warmup_mode=mode, warmup_steps=warmup_steps, power=power)
    schedule = LearningRateSchedule(rate, STEPS)
    rates = [schedule.at(step) for step in range(1, STEPS + 1)]
    assert rates == pytest.approx(rates_of_torch(after, warmup_steps), rel=0, abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.1, 0.5, 0.33])
def test_equal_to_the_formulas_in_shares_of_the_round(mode: str, warmup_ratio: float) -> None:
    """r and w as in ONNX Runtime's runner, with what follows the warm-up rebased to it; through LambdaLR, to 1e-12."""

    def formula(epoch: int) -> float:
        r, w = (epoch + 1) / STEPS, warmup_ratio
        after = {
            "none": 1.0,
            "constant": 1.0,
            "linear": (1 - r) / (1 - w),
            "polynomial": max((1 - r) / (1 - w), 0.0) ** 0.5,
            "cosine": 0.5 * (1 + math.cos(math.pi * (r - w) / (1 - w))),
            "wsd": min(1.0, (1 - r) / (1 - w) / 0.1),
        }
        return r / w if r < w and mode != "none" else after[mode]

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.7)
    scheduler = LambdaLR(optimizer, formula)
    rate = LearningRate(initial_lr=0.7, warmup_mode=mode, warmup_ratio=warmup_ratio)
    schedule = LearningRateSchedule(rate, STEPS)
    for step in range(1, STEPS + 1):
        assert schedule.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=0, abs=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("mode", MODES[1:])
def test_without_a_warmup_and_with_nothing_else(mode: str) -> None:
    """W = 0 starts the descent at the first step; W = N ends at the highest rate."""
    assert factor(1, STEPS, decay_named(mode), 0) == pytest.approx(1.0, abs=0.025)
    rates = [factor(step, STEPS, decay_named(mode), STEPS) for step in range(1, STEPS + 1)]
    assert rates == [step / STEPS for step in range(1, STEPS)] + [1.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("warmup_steps", [0, 7, STEPS])
def test_never_a_jump_up_or_below_zero(mode: str, warmup_steps: int) -> None:
    """The factor rises to 1 at the end of the warm-up and only falls after it; past the end it stays where it was."""
    rates = [factor(step, STEPS, decay_named(mode), warmup_steps) for step in range(1, STEPS + 6)]
    assert all(0 <= rate <= 1 for rate in rates)
    if warmup_steps:
        assert rates[warmup_steps - 1] == 1.0
    after = rates[max(warmup_steps - 1, 0) :]
    assert after == sorted(after, reverse=True)
    end = 0.0 if mode in ("linear", "polynomial", "cosine", "wsd") and warmup_steps < STEPS else 1.0
    assert rates[STEPS - 1 :] == [end] * 6


@pytest.mark.parametrize("mode", MODES)
def test_a_round_of_one_step(mode: str) -> None:
    assert 0 <= factor(1, 1, decay_named(mode)) <= 1
    assert factor(1, 1, decay_named(mode), 1) == 1.0


def test_the_names_of_the_original_runner_are_known() -> None:
    original = ["None", "Cosine", "Constant", "Linear", "Poly"]
    assert [decay_named(name).name for name in original] == ["none", "cosine", "constant", "linear", "polynomial"]
    assert decay_named("POLYNOMIAL") is POLYNOMIAL
    with pytest.raises(ValueError, match="polynomial, cosine, cosine_restarts, wsd or piecewise"):
        decay_named("Exp")


def test_impossible_schedules_are_refused_before_the_first_step() -> None:
    def schedule(**fields: Any) -> LearningRateSchedule:
        return LearningRateSchedule(LearningRate(initial_lr=0.1, warmup_mode="linear", **fields), 100)

    with pytest.raises(
        ValueError, match=r"warmup_ratio is 0.1 and learning_rate.warmup_steps is 5; expected one of the"
    ):
        schedule(warmup_ratio=0.1, warmup_steps=5)
    with pytest.raises(ValueError, match=r"a warm-up of 101 steps; expected 0 to 100, the steps of the round"):
        schedule(warmup_steps=101)
    with pytest.raises(ValueError, match=r"step 0 of 100; expected both to be at least 1"):
        schedule().at(0)

"""Mixtures of experts as one node: gradients against finite differences, dropped tokens, tracing, empty experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from onward.lowering.ops.fused_experts import experts

GENERATOR = torch.Generator().manual_seed(0)
E, K, D, H = 4, 2, 3, 5
CHOSEN = torch.tensor([[0, 1], [2, 0], [0, 2], [1, 0], [0, 2]])  # nobody chooses the last one
FORMS: dict[str, tuple[dict[str, Any], list[tuple[int, ...]]]] = {
    "plain": ({"activation": "gelu"}, [(E, D, H), (E, H, D)]),
    "gated, turned, with biases": (
        {"activation": "swish", "gated": 1, "rows_are_outputs": 1, "is_biased": 1},
        [(E, H, D), (E, H, D), (E, D, H), (E, H), (E, H), (E, D)],
    ),
    "gate and value in one": ({"activation": "swish", "alpha": 1.7, "gated": 2}, [(E, D, 2 * H), (E, H, D)]),
    "gate and value alternate, bounded": (
        {"activation": "sigmoid", "gated": 3, "gate_high": 0.5, "value_low": -0.4, "value_shift": 1.0, "is_biased": 1},
        [(E, D, 2 * H), (E, H, D), (E, 2 * H), (E, D)],
    ),
    "shares scale what experts read": (
        {"activation": "tanh", "scales_input": 1, "is_biased": 1},
        [(E, D, H), (E, H, D), (E, H), (E, D)],
    ),
    "square of ReLU": ({"activation": "relu_squared"}, [(E, D, H), (E, H, D)]),
    "one by one": ({"activation": "gelu_tanh"}, [*[(D, H)] * E, *[(H, D)] * E]),
}


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("form", FORMS, ids=list(FORMS))
def test_gradients_and_traced_code(form: str) -> None:
    attributes, shapes = FORMS[form]
    given = leaf(5, D), leaf(5, K), *(leaf(*shape) for shape in shapes)

    def compute(x: torch.Tensor, shares: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return experts(x, CHOSEN, shares, *weights, experts=E, training=True, **attributes)

    assert torch.autograd.gradcheck(compute, given, fast_mode=True)
    traced = make_fx(compute)(*given)
    torch.testing.assert_close(traced(*given), compute(*given))
    gradients = torch.autograd.grad(compute(*given).sum(), given)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_an_expert_drops_tokens_beyond_its_capacity_in_training() -> None:
    x, shares, up, down = leaf(5, D), leaf(5, K), leaf(E, D, H), leaf(E, H, D)

    def compute(training: bool) -> torch.Tensor:
        return experts(
            x, CHOSEN, shares, up, down, experts=E, activation="relu", capacity_factor=0.8, training=training
        )

    taken, expected = [0] * E, torch.zeros(5, D, dtype=torch.float64)
    for token in range(5):
        for choice, expert in enumerate(CHOSEN[token].tolist()):
            taken[expert] += 1
            if taken[expert] <= 2:  # 0.8 of ten choices over four experts
                result = F.relu(x[token] @ up[expert]) @ down[expert]
                expected[token] = expected[token] + shares[token, choice] * result
    torch.testing.assert_close(compute(True), expected)
    wanted = torch.autograd.grad(expected.square().sum(), (x, shares, up, down))
    for one, other in zip(
        torch.autograd.grad(compute(True).square().sum(), (x, shares, up, down)), wanted, strict=True
    ):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(compute(False), expected)

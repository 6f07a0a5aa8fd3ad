"""A product with a computed weight gives the bits of the product, and keeps nothing for its backward pass."""

from __future__ import annotations

import contextlib

import pytest
import torch

from onward.engine.forecast.allocations import Allocations
from onward.lowering.kernels.frozen_weights import with_computed_weight


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("product", ["matmul", "linear", "conv", "einsum"])
def test_bits_and_memory(product: str, low: bool) -> None:
    codes, scale = torch.randint(-8, 8, (64, 64), dtype=torch.int8), torch.rand(64, 1)
    x = torch.randn(2, 5, 64) if product != "conv" else torch.randn(2, 64, 5)
    functions = {
        "matmul": lambda x, w: torch.matmul(x, w),
        "linear": lambda x, w: torch.nn.functional.linear(x, w),
        "conv": lambda x, w: torch.nn.functional.conv1d(x, w.unsqueeze(-1)),
        "einsum": lambda x, w: torch.einsum("bsk,kn->bsn", x, w),
    }

    def multiply(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = functions[product](x, weight)
        return result

    def dequantize() -> torch.Tensor:
        calls.append(1)
        return codes.float() * scale

    calls: list[int] = []
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext():
        plain = multiply(codes.float() * scale, left)
        with Allocations() as log:
            computed = with_computed_weight(dequantize, (codes, scale), lambda w: multiply(w, right))
    held = sum(log.alive(log.now).values())
    assert held <= computed.nbytes + x.nbytes  # convolutions keep their input in 16 bits
    gradient = torch.randn_like(plain)
    plain.backward(gradient)
    computed.backward(gradient)
    assert torch.equal(plain, computed)
    assert left.grad is not None
    assert right.grad is not None
    assert torch.equal(left.grad, right.grad)
    assert len(calls) == 2


def test_a_view_of_what_is_stored_is_kept() -> None:
    stored, x, calls = torch.randn(8, 4), torch.randn(3, 4, requires_grad=True), []

    def transpose() -> torch.Tensor:
        calls.append(1)
        return stored.T

    with_computed_weight(transpose, (stored,), lambda w: x @ w).sum().backward()
    assert len(calls) == 1


def test_gradients_of_gradients() -> None:
    codes, x = (
        torch.randint(-8, 8, (4, 3), dtype=torch.int8),
        torch.randn(2, 4, dtype=torch.float64, requires_grad=True),
    )

    def compute(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = with_computed_weight(lambda: codes.double(), (codes,), lambda w: (x @ w).square())
        return result

    assert torch.autograd.gradgradcheck(compute, [x])

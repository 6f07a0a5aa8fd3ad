"""Softmax of short rows: torch's values and gradients, to a few units in the last place."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, vmap

from onward.lowering.kernels import short_rows
from onward.lowering.kernels.short_rows import log_softmax, softmax

PAIRS = [(softmax, torch.softmax), (log_softmax, torch.log_softmax)]


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_rows, "LEAST_ELEMENTS", 1)


def is_ours(y: torch.Tensor) -> bool:
    return type(y.grad_fn).__name__ in ("_SoftmaxBackward", "_LogSoftmaxBackward")


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("size", [1, 2, 5, 7])
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2.0**-23), (torch.float64, 2.0**-52)])
def test_as_torch(ours, theirs, size: int, dtype: torch.dtype, unit: float) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(size)
    x = 5 * torch.randn(3, 40, size, generator=generator, dtype=dtype)
    weight = torch.randn(x.shape, generator=generator, dtype=dtype)
    own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = ours(own, -1), theirs(other, -1)
    assert is_ours(found)
    found.backward(weight)
    expected.backward(weight)
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found, expected, rtol=4 * unit, atol=4 * unit * scale)
    assert own.grad is not None
    torch.testing.assert_close(own.grad, other.grad, rtol=16 * unit, atol=16 * unit)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_infinities_and_nans(ours, theirs) -> None:  # type: ignore[no-untyped-def]
    low, nan = -math.inf, math.nan
    x = torch.tensor([[low, 0.0, 1.0], [low, low, low], [math.inf, 0.0, 1.0], [nan, 0.0, 1.0], [-1e30, 0.0, 1e30]])
    torch.testing.assert_close(ours(x, 1), theirs(x, 1), equal_nan=True)


@pytest.mark.parametrize("ours", [softmax, log_softmax])
def test_the_gradient_has_a_gradient(ours) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ours(x, -1).pow(3), (x,))


def test_what_torch_computes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows, other axes, 16 bits, autocast, few numbers, and what is transformed."""
    short = torch.randn(4, 7, requires_grad=True)
    assert is_ours(softmax(short, -1))
    assert not is_ours(softmax(torch.randn(4, 16, requires_grad=True), -1))
    assert not is_ours(softmax(short, 0))
    assert not is_ours(softmax(short.bfloat16(), -1))
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_ours(softmax(short, -1))
    x = short.detach()
    expected = vmap(grad(lambda row: torch.softmax(row, -1)[0]))(x)
    assert torch.equal(vmap(grad(lambda row: softmax(row, -1)[0]))(x), expected)
    monkeypatch.setattr(short_rows, "LEAST_ELEMENTS", 29)
    assert not is_ours(softmax(short, -1))

"""Bounded elements: values and gradients are those of torch's `clamp`, at the bounds too."""

from __future__ import annotations

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from onward.lowering.kernels import bounds
from onward.lowering.kernels.bounds import clamp

BOUNDS = [(0.0, 6.0), (0.1, None), (None, 0.1), (-1.0, 1.0), (2.0, 1.0), (1.0, 1.0), (0, 6)]


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "LEAST_ELEMENTS", 1)


def drawn(dtype: torch.dtype, low: float | None, high: float | None) -> torch.Tensor:
    """Elements around the bounds, equal to them, and next to them."""
    given = [torch.tensor(float(bound), dtype=dtype) for bound in (low, high) if bound is not None]
    near = [torch.nextafter(one, torch.tensor(side, dtype=dtype)) for one in given for side in (-math.inf, math.inf)]
    extremes = [torch.tensor(value, dtype=dtype) for value in (math.inf, 1e30, -1e30)]
    return torch.cat([3 * torch.randn(50, dtype=dtype), torch.stack([*given, *near, *extremes])])


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_torch_bounds(low: float | None, high: float | None, dtype: torch.dtype) -> None:
    x = drawn(dtype, low, high)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = clamp(ours, low, high), torch.clamp(theirs, low, high)
    weight = torch.randn_like(x)
    assert type(found.grad_fn).__name__ == "_ClampBackward"
    found.backward(weight)
    expected.backward(weight)
    assert torch.equal(found, expected)
    assert torch.equal(ours.grad, theirs.grad)


def test_the_gradient_has_a_gradient() -> None:
    x = torch.tensor([-1.0, 0.25, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: clamp(x, 0.0, 2.0).pow(3), (x,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_types_are_left_to_torch(dtype: torch.dtype) -> None:
    found = clamp(torch.randn(8, dtype=dtype, requires_grad=True), 0.0, 1.0)
    assert type(found.grad_fn).__name__ == "ClampBackward1"


def test_few_elements_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "LEAST_ELEMENTS", 9)
    assert type(clamp(torch.randn(8, requires_grad=True), 0.0, 1.0).grad_fn).__name__ == "ClampBackward1"


def test_transforms_of_functions_go_through() -> None:
    x = torch.randn(3, 8)
    found = torch.func.vmap(torch.func.grad(lambda x: clamp(x, 0.0, 1.0).sum()))(x)
    assert torch.equal(found, ((x >= 0) & (x <= 1)).float())


def test_an_open_size_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written for a device is traced for any batch: a size that is compared would be fixed."""
    monkeypatch.setattr(bounds, "LEAST_ELEMENTS", 9)
    traced = make_fx(lambda x: clamp(x, 0.0, 1.0), tracing_mode="symbolic")(torch.randn(8, requires_grad=True))
    (size,) = next(node for node in traced.graph.nodes if node.op == "placeholder").meta["val"].shape
    assert isinstance(size, torch.SymInt)
    assert not size.node.shape_env.guards

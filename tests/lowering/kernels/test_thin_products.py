"""Products of matrices with rows or columns: torch's `matmul`, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from onward.lowering.kernels import thin_products
from onward.lowering.kernels.thin_products import multiply_thin


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin_products, "LEAST_ELEMENTS", 1)


@pytest.mark.parametrize("sizes", [(5, 8, 1), (1, 8, 5), (5, 1, 8), (1, 8, 1), (1, 1, 1), (3, 1, 1)])
@pytest.mark.parametrize("batch", [(7,), (3, 2)])
def test_as_torch_multiplies(sizes: tuple[int, int, int], batch: tuple[int, ...]) -> None:
    rows, inner, columns = sizes
    A, B = torch.randn(*batch, rows, inner), torch.randn(*batch, columns, inner).mT
    results, weight = [], torch.randn(*batch, rows, columns)
    for function in (multiply_thin, torch.matmul):
        own = A.clone().requires_grad_(), B.clone().requires_grad_()
        found = function(*own)
        found.backward(weight)
        results.append((found.detach(), *(one.grad for one in own)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_the_gradient_has_a_gradient() -> None:
    A = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    B = torch.randn(4, 2, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(multiply_thin, (A, B))
    assert torch.autograd.gradgradcheck(multiply_thin, (A, B))


@pytest.mark.parametrize(
    ("left", "right"),
    [((4, 3, 2), (4, 2, 3)), ((4, 3, 2), (1, 2, 1)), ((3, 2), (2, 1)), ((4, 3, 2), (2, 1)), ((4, 3, 2), (4, 3, 1))],
)
def test_other_products_are_left_to_torch(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    assert multiply_thin(torch.randn(left, requires_grad=True), torch.randn(right)) is None


def test_types_sizes_and_passes_without_gradients_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = torch.randn(4, 3, 2, requires_grad=True), torch.randn(4, 2, 1)
    assert multiply_thin(A.bfloat16(), B.bfloat16()) is None
    with torch.no_grad():
        assert multiply_thin(A, B) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert multiply_thin(A, B) is None
    monkeypatch.setattr(thin_products, "LARGEST_MATRIX", 6)
    assert multiply_thin(A, B) is None
    monkeypatch.setattr(thin_products, "LEAST_ELEMENTS", 25)
    monkeypatch.setattr(thin_products, "LARGEST_MATRIX", 7)
    assert multiply_thin(A, B) is None


@pytest.mark.parametrize(("left", "right"), [(True, True), (True, False), (False, True)])
def test_only_what_gradients_need_is_kept(left: bool, right: bool) -> None:
    A, B = torch.randn(4, 3, 2, requires_grad=left), torch.randn(4, 2, 1, requires_grad=right)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(tuple(one.shape)) or one, lambda one: one):
        found = multiply_thin(A, B)
    assert sorted(kept) == sorted([(4, 2, 1)] * left + [(4, 3, 2)] * right)
    found.sum().backward()


def test_open_sizes_stay_open() -> None:
    """What is written for a device is traced for any batch: a size that is compared would be fixed."""
    known = []

    def multiply(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        known.append(multiply_thin(A, B))
        return torch.matmul(A, B)

    traced = make_fx(multiply, tracing_mode="symbolic")(torch.randn(9, 3, 2), torch.randn(9, 2, 1))
    size = next(node for node in traced.graph.nodes if node.op == "placeholder").meta["val"].shape[0]
    assert known == [None]
    assert isinstance(size, torch.SymInt)
    assert traced(torch.ones(7, 3, 2), torch.ones(7, 2, 1)).shape == (7, 3, 1)

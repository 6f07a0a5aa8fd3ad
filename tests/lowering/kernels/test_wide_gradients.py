"""Gradients of 16 bits that are summed in float32: of no second order, of frozen parameters, and of nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.layer_norms import layer_norm
from onward.lowering.kernels.wide_gradients import rounds_each, with_wide_gradient

SHAPES = {"X": (300, 16), "scale": (16,), "bias": (16,)}


def numbers(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(shape).to(dtype).requires_grad_() for shape in SHAPES.values()]


def norm(X: Tensor, scale: Tensor | None, bias: Tensor | None = None) -> Tensor:
    return layer_norm(X, (16,), scale, bias, 1e-5)


def pad(X: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return with_wide_gradient(lambda x: F.pad(x[None], (40, 40), mode="replicate"), X) ** 2


def second(function: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """How much the squares of the gradient of X change with everything."""
    (of_x,) = torch.autograd.grad(function(*given).square().sum(), given[0], create_graph=True)
    found = torch.autograd.grad(of_x.square().sum(), given, allow_unused=True, materialize_grads=True)
    return [of_x.detach(), *found]


@pytest.mark.parametrize("function", [norm, pad])
def test_second_derivatives_are_those_of_float64(function: Callable[..., Tensor]) -> None:
    given = numbers()
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    for found, expected in zip(second(function, given), second(function, wide), strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2)])
def test_frozen_parameters_get_no_gradient(trained: tuple[int, ...]) -> None:
    given = numbers()
    for place, tensor in enumerate(given):
        tensor.requires_grad_(place in trained)
    leaves = [given[place] for place in trained]
    found = torch.autograd.grad(norm(*given).square().sum(), leaves)
    wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in given]
    expected = torch.autograd.grad(norm(*wide).square().sum(), [wide[place] for place in trained])
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= 0.02 * other.norm()


def test_a_norm_without_bias_or_without_scale() -> None:
    X, scale, _ = numbers()
    assert torch.equal(norm(X, scale), F.layer_norm(X, (16,), scale))
    assert torch.equal(norm(X, None), F.layer_norm(X, (16,)))


def test_only_16_bits_that_are_differentiated_take_the_long_way() -> None:
    assert rounds_each(*numbers())
    assert not rounds_each(*numbers(torch.float32))
    assert not rounds_each(*(tensor.detach() for tensor in numbers()))
    with torch.no_grad():
        assert not rounds_each(*numbers())


def test_no_rows_give_zero() -> None:
    _, scale, bias = numbers()
    X = torch.zeros(0, 16, dtype=torch.bfloat16, requires_grad=True)
    found = torch.autograd.grad(norm(X, scale, bias).sum(), [X, scale, bias])
    assert [tuple(one.shape) for one in found] == [(0, 16), (16,), (16,)]
    assert not any(one.any() for one in found)

"""Dropout on CPUs: as many elements as were asked for, the same mean, one mask both ways, repeatable."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onward.lowering.kernels.attention import attend
from onward.lowering.kernels.dropout import LEAST_ELEMENTS, drop

SIZE = (4, 100, 300, 5)
COUNT = 600_000


def ones(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(sizes or SIZE, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_and_the_mean_stays(ratio: float) -> None:
    """Within five standard deviations of a binomial distribution, along every axis of its own."""
    torch.manual_seed(0)
    dropped = (drop(ones(), ratio) == 0).double()
    for axes in ((0, 1, 2, 3), (1, 2, 3), (0, 1, 2), (0, 2, 3)):
        shares = dropped.mean(axes)
        count = COUNT / shares.numel()
        assert (shares - ratio).abs().max() < 5 * (ratio * (1 - ratio) / count) ** 0.5
    kept = drop(ones(), ratio).detach()
    levels = round(ratio * 65536)
    assert set(kept.unique().tolist()) == {0.0, float(torch.tensor(65536 / (65536 - levels)))}


def test_neighbors_are_independent() -> None:
    """Four elements share a number of 64 bits; their correlation is within five of its standard deviations."""
    torch.manual_seed(0)
    kept = (drop(ones(), 0.5).flatten() != 0).double() - 0.5
    for distance in range(1, 9):
        correlation = 4 * (kept[distance:] * kept[:-distance]).mean()
        assert abs(correlation) < 5 / COUNT**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_is_dropped_alike(dtype: torch.dtype) -> None:
    X = torch.randn(SIZE, dtype=dtype, requires_grad=True)
    Y = drop(X, 0.3)
    direction = torch.randn(SIZE, dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(Y, X, direction, create_graph=True)
    factors = (Y != 0).double() * (65536 / (65536 - 19661))
    for found, expected in ((Y, X), (gradient, direction)):
        rounded = (expected.detach().to(torch.float64) * factors).to(dtype)
        torch.testing.assert_close(found.detach(), rounded, rtol=torch.finfo(dtype).eps, atol=0.0)
    (second,) = torch.autograd.grad(gradient.sum(), direction)
    assert torch.equal(second != 0, Y != 0)


def test_the_same_seed_drops_the_same() -> None:
    def seeded(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return drop(ones(), 0.1).detach()

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))
    torch.manual_seed(1)
    drop(ones(), 0.1)
    assert not torch.equal(drop(ones(), 0.1).detach(), seeded(1))


def test_what_is_kept_for_the_gradient_takes_a_byte() -> None:
    kept: list[torch.Tensor] = []
    X = torch.randn(8, 16, 32, 33).contiguous(memory_format=torch.channels_last).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        Y = drop(X, 0.1)
    assert [tensor.dtype for tensor in kept] == [torch.bool]
    assert Y.stride() == kept[0].stride() == X.stride()


@pytest.mark.parametrize(("count", "ratio"), [(LEAST_ELEMENTS - 1, 0.1), (COUNT, 0.01), (COUNT, 0.99), (COUNT, 0.0)])
def test_small_tensors_and_extreme_shares_are_torchs(count: int, ratio: float) -> None:
    X = torch.randn(count, requires_grad=True)
    torch.manual_seed(0)
    found = drop(X, ratio)
    torch.manual_seed(0)
    assert torch.equal(found, F.dropout(X, ratio))


def test_attention_drops_probabilities() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 2, 3, 96, 16).unbind(0)
    value = torch.eye(96).expand(2, 3, 96, 96)
    mask = torch.rand(2, 1, 1, 96) > 0.2
    found = attend(query[0], key[0], value, mask, scale=0.25, dropout=0.25)
    expected = attend(query[0], key[0], value, mask, scale=0.25) / 0.75
    kept = found != 0
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-5, atol=1e-7)
    shares = kept.double().mean((0, 1, 2))[mask.all(0).flatten()]
    assert abs(float(shares.mean()) - 0.75) < 5 * (0.1875 / (shares.numel() * 576)) ** 0.5

"""Adasum against the formula of its paper in numpy, for every number of ranks up to five."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from onward.parallel.adasum import adasum
from tests.ranks import run_on_ranks

SHAPES = [(3, 4), (5,), (), (2, 2)]


def gradients_of(rank: int, kind: str) -> list[np.ndarray]:
    """Four tensors of a rank; the last is zero on every second one."""
    generator = np.random.default_rng(0 if kind == "parallel" else rank)
    found = [generator.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    found[3] *= rank % 2 == 0 or kind == "parallel"
    return found


def combine(kind: str) -> list[torch.Tensor]:
    gradients = [torch.from_numpy(np.array(one)) for one in gradients_of(dist.get_rank(), kind)]
    adasum(gradients, dist.group.WORLD)
    return gradients


def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Maleki et al. 2021, equation 3; where one is zero, the other."""
    product, of_a, of_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    if of_a == 0 or of_b == 0:
        return a + b
    return (1 - product / (2 * of_a)) * a + (1 - product / (2 * of_b)) * b


def tree(level: list[np.ndarray]) -> np.ndarray:
    """Neighbors in pairs, then pairs of pairs; who has no neighbor waits."""
    while len(level) > 1:
        level = [pair(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


@pytest.mark.parametrize(
    "size", [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_the_formula_on_every_rank_the_same_bits(size: int) -> None:
    results = run_on_ranks(size, combine, "different")
    for index in range(len(SHAPES)):
        expected = tree([gradients_of(rank, "different")[index].astype(np.float64) for rank in range(size)])
        np.testing.assert_allclose(results[0][index].numpy(), expected, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(result[index], results[0][index]) for result in results)


def test_parallel_gradients_average() -> None:
    result = run_on_ranks(2, combine, "parallel")[0]
    for found, same in zip(result, gradients_of(0, "parallel"), strict=True):
        np.testing.assert_allclose(found.numpy(), same, rtol=1e-6)


def orthogonal() -> torch.Tensor:
    gradient = torch.zeros(4)
    gradient[dist.get_rank()] = 2.0 + dist.get_rank()
    adasum([gradient], dist.group.WORLD)
    return gradient


def test_orthogonal_gradients_add_up() -> None:
    assert run_on_ranks(2, orthogonal)[0].tolist() == [2.0, 3.0, 0.0, 0.0]

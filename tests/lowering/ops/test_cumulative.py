"""Running sums and products along an axis, exclusive, reversed, and of nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onward.lowering.ops.cumulative import cum_prod, cum_sum

X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


@pytest.mark.parametrize(
    ("exclusive", "reverse", "expected"),
    [(0, 0, [1, 3, 6]), (1, 0, [0, 1, 3]), (0, 1, [6, 5, 3]), (1, 1, [5, 3, 0])],
)
def test_sums(exclusive: int, reverse: int, expected: list[float]) -> None:
    for axis in (1, -1, (1,)):
        assert cum_sum(X, axis, exclusive=exclusive, reverse=reverse)[0].tolist() == expected


def test_products_begin_with_one() -> None:
    assert cum_prod(X, 0, exclusive=1).tolist() == [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]]


def test_nothing_stays_nothing_and_sums_keep_their_type() -> None:
    assert cum_sum(torch.zeros(2, 0), 1, exclusive=1).shape == (2, 0)
    bytes_ = torch.tensor([200, 100], dtype=torch.uint8)
    assert cum_sum(bytes_, 0).tolist() == [200, 44]
    large = torch.from_numpy(np.array([2**63, 2**63 + 1], np.uint64))
    assert cum_sum(large, 0).numpy().tolist() == [2**63, 1]


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_is_none(axis: int) -> None:
    with pytest.raises(ValueError, match=rf"axis {axis} is out of range for a tensor of rank 2"):
        cum_sum(X, axis)

"""Softmax, its logarithm and Hardmax; before opset 13 over all axes from one on together."""

from __future__ import annotations

import pytest
import torch

from onward.lowering.ops import normalized_exponential as ops

X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1, -3])
def test_older_versions_flatten_from_the_axis_on(axis: int) -> None:
    start = axis % 3 if axis < 0 else axis
    rows = X.reshape(*X.shape[:start], -1)
    torch.testing.assert_close(ops.softmax_before_13(X, axis=axis), torch.softmax(rows, -1).reshape(X.shape))
    torch.testing.assert_close(ops.log_softmax_before_13(X, axis=axis), torch.log_softmax(rows, -1).reshape(X.shape))
    assert int(ops.hardmax_before_13(X, axis=axis).sum()) == rows[..., 0].numel()


def test_one_at_the_first_maximum() -> None:
    assert ops.hardmax(torch.tensor([[1.0, 3.0, 3.0]])).tolist() == [[0.0, 1.0, 0.0]]
    assert ops.hardmax(torch.tensor([[1.0], [3.0]]), axis=0).tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("axis", [4, -4])
def test_an_axis_that_is_none(axis: int) -> None:
    with pytest.raises(ValueError, match=rf"axis {axis} is out of range for a tensor of rank 3"):
        ops.softmax_before_13(X, axis=axis)

"""Values in Python: numbers and nested tuples, to tensors and back, and how they broadcast."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.lowering.kernels.host import flatten, freeze, host_shape, map_broadcast, to_host, to_tensor, unflatten

CPU = torch.device("cpu")


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=4))
def test_shapes_and_numbers_return(sizes: list[int]) -> None:
    tensor = torch.arange(int(np.prod(sizes))).reshape(sizes)
    value = to_host(tensor)
    shown = host_shape(value)
    assert shown == tuple(sizes[: sizes.index(0) + 1] if 0 in sizes else sizes)  # nothing lies behind an empty axis
    assert flatten(value) == tensor.flatten().tolist()
    if 0 not in sizes:
        assert unflatten(flatten(value), tuple(sizes)) == value
        assert torch.equal(to_tensor(value, torch.int64, CPU), tensor)


def test_what_is_no_tensor_is_taken_as_it_is() -> None:
    assert to_host(3) == 3
    assert freeze([1, [2, (3, [])]]) == (1, (2, (3, ())))
    assert to_tensor(True, torch.bool, CPU).shape == ()


SHAPES = [((), ()), ((2,), ()), ((2, 1), (3,)), ((1,), (2, 3)), ((0,), (1,)), ((2, 1, 3), (4, 1))]


@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_numbers_broadcast_as_arrays_do(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = (torch.arange(int(np.prod(shape))).reshape(shape) for shape in (left, right))
    expected = a * 10 + b
    found = map_broadcast(lambda x, y: x * 10 + y, to_host(a), to_host(b))
    assert found == to_host(expected)


def test_lengths_that_do_not_broadcast_are_named() -> None:
    with pytest.raises(ValueError, match=r"lengths \[2, 3\] along one axis do not broadcast"):
        map_broadcast(max, (1, 2), (1, 2, 3))
    with pytest.raises(ValueError, match=r"lengths \[0, 3\] along one axis do not broadcast"):
        map_broadcast(max, (), (1, 2, 3))

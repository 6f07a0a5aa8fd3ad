"""Copies and choices of many tensors at once."""

from __future__ import annotations

import pytest
import torch

from onward.engine.many_tensors import choose, copy_all

SHAPES = ((3,), (), (2, 5), (0,))


def drawn(first: int) -> list[torch.Tensor]:
    """Of several shapes and types; one holds NaN."""
    floats = [torch.full(shape, float(first + place)) for place, shape in enumerate(SHAPES)]
    return [*floats, torch.tensor([float("nan"), first]), torch.tensor(first), torch.full((2,), first).double()]


@pytest.mark.parametrize("is_first", [True, False])
def test_all_of_one_list_are_chosen_as_they_are(is_first: bool) -> None:
    one, other = drawn(0), drawn(7)
    chosen = choose(torch.tensor(is_first), one, other)
    for mine, expected in zip(chosen, one if is_first else other, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_chosen_or_copied_of_nothing() -> None:
    assert choose(torch.tensor(True), [], []) == []
    copy_all([], [])


def test_copies_are_in_the_targets_memory() -> None:
    source, target = drawn(0), drawn(7)
    places = [tensor.data_ptr() for tensor in target]
    copy_all(source, target)
    assert [tensor.data_ptr() for tensor in target] == places
    for mine, expected in zip(target, source, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)

"""Shapes of samples fitted to those of inputs: axes of size 1 come and go where there is one way, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from onward.engine.inputs.sample_shapes import fit_sample_shape


@pytest.mark.parametrize(
    ("found", "expected", "fitted"),
    [
        ((), (1,), (1,)),
        ((1,), (), ()),
        ((1, 1), (1,), (1,)),
        ((), ("classes",), (1,)),
        ((1,), ("a", 1, "b"), (1, 1, 1)),
        ((5,), (5, 1), (5, 1)),
        ((5,), (1, 5), (1, 5)),
        ((5,), ("a", 1), (5, 1)),
        ((5, 1, 3), (5, 3), (5, 3)),
        ((28, 28), (1, 28, 28), (1, 28, 28)),
        ((28, 28, 1), (1, 28, 28), (1, 28, 28)),
        ((5, 1), ("a", "b"), (5, 1)),
        ((5,), ("a", "b"), None),
        ((3, 5), (5, 3), None),
        ((6,), (2, 3), None),
        ((2, 3), (6,), None),
        ((5,), (), None),
        ((), (2,), None),
        ((5,), (1, 1), None),
    ],
)
def test_what_fits(found: tuple[int, ...], expected: tuple[int | str, ...], fitted: tuple[int, ...] | None) -> None:
    assert fit_sample_shape(found, expected) == fitted


def _shapes() -> Iterator[tuple[int, ...]]:
    for rank in range(4):
        yield from product((1, 2, 3), repeat=rank)


def test_of_all_small_shapes_those_fit_that_numpy_squeezes_to_the_same() -> None:
    """With every size known there is one way, or none."""
    for found, expected in product(_shapes(), repeat=2):
        same = np.empty(found).squeeze().shape == np.empty(expected).squeeze().shape
        assert fit_sample_shape(found, expected) == (expected if same else None)


def test_open_sizes_never_change_how_many_elements_there_are() -> None:
    for found, sizes in product(_shapes(), repeat=2):
        for is_open in product((False, True), repeat=len(sizes)):
            expected = tuple("?" if open_ else size for size, open_ in zip(sizes, is_open, strict=True))
            fitted = fit_sample_shape(found, expected)
            if fitted is not None:
                assert math.prod(fitted) == math.prod(found)
                assert len(fitted) == len(expected)
                assert all(isinstance(want, str) or size == want for size, want in zip(fitted, expected, strict=True))

"""How one stored tensor was made of another, found by its numbers; what they do not say is not found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onward.graph.nodes.rearrangement import Rearrangement, find_rearrangement, is_equal

ORIGINAL = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)


def applied(found: Rearrangement, original: np.ndarray) -> np.ndarray:
    if found.elements is not None:
        return original.reshape(-1)[found.elements].reshape(found.shape_of(original.shape))
    moved = original.transpose(found.permutation)
    return moved if found.shape is None else np.broadcast_to(moved, found.shape)


WAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda x: x,
    "permuted": lambda x: x.transpose(2, 0, 1),
    "repeated": lambda x: np.broadcast_to(x, (2, 3, 4, 5)),
    "reshaped": lambda x: x.reshape(6, 10),
    "sliced": lambda x: x[1:, ::2],
    "sliced and permuted": lambda x: x[:2].transpose(1, 0, 2),
    "reversed": lambda x: x[::-1],
    "one row": lambda x: x[1, 2],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_the_copy_is_made_again(way: str, dtype: type) -> None:
    original = ORIGINAL.astype(dtype) if dtype is not np.int8 else np.arange(60, dtype=np.int8).reshape(3, 4, 5)
    copy = np.ascontiguousarray(WAYS[way](original))
    found = find_rearrangement(copy, original)
    assert found is not None
    np.testing.assert_array_equal(applied(found, original), copy)
    assert found.is_identity is (way == "as it is")


@pytest.mark.parametrize(
    "copy",
    [
        np.zeros((3, 4, 5), np.float32), ORIGINAL.astype(np.float64), ORIGINAL[:1, :1, :1], ORIGINAL + 1,
        np.full((3, 4, 5), np.nan, np.float32), np.empty((0,), np.float32),
    ],
)  # fmt: skip
def test_numbers_that_say_nothing(copy: np.ndarray) -> None:
    assert find_rearrangement(copy, ORIGINAL) is None


def test_elements_that_occur_twice_have_no_place() -> None:
    original = np.array([1.0, 2.0, 1.0, 3.0], np.float32)
    assert find_rearrangement(np.array([1.0, 3.0], np.float32), original) is not None  # a stretch of it
    assert find_rearrangement(np.array([3.0, 1.0], np.float32), original) is None


def test_equality_is_of_bits_and_shapes() -> None:
    assert is_equal(np.float32(0.0).reshape(()), np.float32(0.0).reshape(()))
    assert not is_equal(np.array(0.0), np.array(-0.0))
    assert not is_equal(np.zeros(2), np.zeros((2, 1)))
    assert not is_equal(np.zeros(2), np.zeros(2, np.float32))


def test_tensors_with_other_first_rows_are_not_read_in_full(tmp_path: Path) -> None:
    """A terabyte each, as the files of large models are mapped: comparing them took minutes, and their memory."""
    arrays = []
    for number in (1.0, 2.0):
        array = np.memmap(tmp_path / f"{number}", np.float32, "w+", shape=(2**18, 2**20))
        array[0, 0] = number
        arrays.append(array)
    assert find_rearrangement(*arrays) is None

"""Integers as rows of bits: shifts and logic are numpy's for every type, at the ends of its range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onward.lowering.ops.bitwise import bit_shift, bitwise_not


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_shifts(dtype: type) -> None:
    bits = np.iinfo(dtype).bits
    numbers = np.array([0, 1, 5, 2 ** (bits - 1), 2**bits - 1], dtype)
    for amount in (0, 1, 3, bits - 1):
        shift = np.full_like(numbers, amount)
        for direction, expected in (("LEFT", numbers << shift), ("RIGHT", numbers >> shift)):
            found = bit_shift(torch.from_numpy(numbers), torch.from_numpy(shift), direction=direction)
            assert found.numpy().tolist() == expected.tolist(), (direction, amount)
            assert found.numpy().dtype == dtype


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
def test_nothing_is_left_of_a_number_that_is_shifted_by_its_width(dtype: type, direction: str) -> None:
    bits = np.iinfo(dtype).bits
    numbers, amount = (torch.from_numpy(np.full(2, one, dtype)) for one in (2**bits - 1, bits))
    assert bit_shift(numbers, amount, direction=direction).numpy().tolist() == [0, 0]


def test_a_direction_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"direction is 'UP'; it must be LEFT or RIGHT"):
        bit_shift(torch.ones(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8), direction="UP")


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint16, np.uint64])
def test_logic(dtype: type) -> None:
    generator, limits = np.random.default_rng(0), np.iinfo(dtype)
    a, b = generator.integers(limits.min, limits.max, (2, 20), dtype, endpoint=True)
    first, second = torch.from_numpy(a), torch.from_numpy(b)
    assert torch.bitwise_and(first, second).numpy().tolist() == (a & b).tolist()
    assert torch.bitwise_or(first, second).numpy().tolist() == (a | b).tolist()
    assert torch.bitwise_xor(first, second).numpy().tolist() == (a ^ b).tolist()
    assert bitwise_not(first).numpy().tolist() == (~a).tolist()

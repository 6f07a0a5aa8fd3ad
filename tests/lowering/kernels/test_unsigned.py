"""Unsigned integers computed in int64: results are numpy's, at the ends of the range too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onward.lowering.kernels.unsigned import divide_unsigned, narrow_ordered, unsigned, widen, widen_ordered

EDGES = {
    torch.uint16: [0, 1, 2**15, 2**16 - 1],
    torch.uint32: [0, 1, 2**31, 2**32 - 1],
    torch.uint64: [0, 1, 2**63 - 1, 2**63, 2**64 - 1],
}


def of(dtype: torch.dtype, numbers: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, str(dtype).removeprefix("torch.")))


@pytest.mark.parametrize("dtype", EDGES, ids=str)
def test_order_is_kept_and_values_return(dtype: torch.dtype) -> None:
    numbers = of(dtype, EDGES[dtype])
    wide = widen_ordered(numbers)
    assert wide.tolist() == sorted(wide.tolist())
    assert narrow_ordered(wide, dtype).numpy().tolist() == EDGES[dtype]
    assert widen(torch.ones(1)).dtype is torch.float32


@pytest.mark.parametrize("dtype", EDGES, ids=str)
def test_functions_give_what_numpy_gives(dtype: torch.dtype) -> None:
    first = of(dtype, EDGES[dtype])
    second = of(dtype, EDGES[dtype][::-1])
    a, b = first.numpy(), second.numpy()
    add, largest, less = unsigned("wraps")(torch.add), unsigned("orders")(torch.maximum), unsigned("compares")(torch.lt)
    assert add(first, second).numpy().tolist() == (a + b).tolist()
    assert add(first, second).dtype is dtype
    assert largest(first, second).numpy().tolist() == np.maximum(a, b).tolist()
    assert less(first, second).tolist() == (a < b).tolist()
    assert add(torch.ones(2), 1).tolist() == [2.0, 2.0]


def test_numbers_beyond_int64_are_compared_and_added() -> None:
    largest = of(torch.uint64, [2**64 - 1, 5])
    clamp: Any = unsigned("orders")(lambda x, low: torch.clamp(x, min=low))
    assert clamp(largest, 2**63 + 1).numpy().tolist() == [2**64 - 1, 2**63 + 1]
    add: Any = unsigned("wraps")(lambda x, y: x + y)
    assert add(largest, 2**64 - 1).numpy().tolist() == [2**64 - 2, 4]


def test_quotients_are_rounded_down_over_the_full_range() -> None:
    draw = np.random.default_rng(0).integers(0, 2**64, 2000, np.uint64, endpoint=False)
    numbers = np.concatenate([draw, np.array(EDGES[torch.uint64], np.uint64)])
    divisors = np.concatenate([draw[::-1] >> draw % np.uint64(64), np.array(EDGES[torch.uint64][::-1], np.uint64)])
    divisors = np.maximum(divisors, np.uint64(1))
    found = divide_unsigned(torch.from_numpy(numbers.view(np.int64)), torch.from_numpy(divisors.view(np.int64)))
    assert found.numpy().view(np.uint64).tolist() == (numbers // divisors).tolist()

"""The rate of matmuls, and operations in a unit of their size."""

from __future__ import annotations

import pytest
import torch

from onward.engine.matmul_rate import format_operations, matmul_rate


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (512.0, "0.5 kFLOP"),
        (28_860.0, "28.9 kFLOP"),
        (7.1e7, "71.0 MFLOP"),
        (3.29e10, "32.9 GFLOP"),
        (8e14, "800.0 TFLOP"),
    ],
)
def test_operations_are_counted_in_a_unit_of_their_size(count: float, words: str) -> None:
    assert format_operations(count) == words


def test_the_rate_of_a_product_is_that_of_real_work() -> None:
    assert 1e8 < matmul_rate(torch.device("cpu"), torch.float32) < 1e15

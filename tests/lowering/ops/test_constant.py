"""Constants that are outputs themselves: every attribute, and where the tensor is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onward.lowering.ops.constant import constant

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "dtype", "expected"),
    [
        ({"value": torch.tensor([1], dtype=torch.int8)}, torch.int8, [1]),
        ({"value_int": 0}, torch.int64, 0),
        ({"value_ints": ()}, torch.int64, []),
        ({"value_float": 0.0}, torch.float32, 0.0),
        ({"value_floats": (1.0, 2.0)}, torch.float32, [1.0, 2.0]),
    ],
)
def test_every_attribute(given: dict[str, Any], dtype: torch.dtype, expected: Any) -> None:
    """Zeros and empty lists are values, too."""
    found = constant(**given, device=CPU)
    assert (found.dtype, found.tolist()) == (dtype, expected)

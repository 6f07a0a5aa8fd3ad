"""Trained values in the types that a file stores: bits of every type, and what is beyond a type's range."""

from __future__ import annotations

import warnings

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onward.artifacts.stored_values import to_numpy

VALUES = torch.tensor([[1.5, -0.25], [0.0, 3.0]])
FLOATS = ["DOUBLE", "FLOAT", "FLOAT16", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2"]


@pytest.mark.parametrize("name", FLOATS)
def test_every_float_type(name: str) -> None:
    dtype = ir.DataType[name]
    found = to_numpy(VALUES, dtype, "w")
    assert found.dtype == dtype.numpy()
    assert found.astype(np.float64).tolist() == VALUES.tolist()
    assert to_numpy(VALUES.t(), dtype, "w").flags.c_contiguous


def test_integers_of_four_bits() -> None:
    found = to_numpy(torch.tensor([-8, 7], dtype=torch.int8), ir.DataType.INT4, "w")
    assert found.astype(np.int64).tolist() == [-8, 7]


def test_numbers_beyond_fp16_are_counted() -> None:
    with pytest.warns(UserWarning, match=r"^2 elements of the weight 'w' are beyond the range of fp16, the model"):
        found = to_numpy(torch.tensor([1e5, -1e5, 1.0, float("inf")]), ir.DataType.FLOAT16, "w")
    assert np.isinf(found).tolist() == [True, True, False, True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_numpy(torch.tensor([float("inf"), 65504.0]), ir.DataType.FLOAT16, "w")
        to_numpy(torch.tensor([1e5]), ir.DataType.BFLOAT16, "w")
